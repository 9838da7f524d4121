"""Put NaN or infinity into an engine's state, one value at a time, and record whether a save finds it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.fragments import FlatTensor, base_optimizer, flat_tensors
from pretrain.checkpoint.save.background import Snapshot
from pretrain.checkpoint.save.save_checkpoint import write_files
from pretrain.checkpoint.save.saver import Saver
from pretrain.distributed.collectives import gather


def put_nan_at(step: int) -> None:
    """Put NaN into the last rank's optimizer states just before the checkpoint of `step` is saved."""
    save = Saver.save

    def poison_and_save(self: Saver, engine: DeepSpeedEngine, **position: Any) -> None:
        if position["step"] == step:
            _exchange(engine, flat_tensors(engine)[-1], "state", 0, torch.nan)
        save(self, engine, **position)

    Saver.save = poison_and_save  # type: ignore[method-assign]


def found_by_each_rank(engine: DeepSpeedEngine) -> dict[str, list[bool]]:
    """Return {place of a value: for each rank, whether the tensors that it would write are finite}.

    The value is put into the last element of the last rank's last flat tensor, and removed again. "weights" and "state"
    are recorded only if the last rank writes them, and "padding" only if the tensor has padding between
    parameters.
    """
    results = {"nothing": _write_and_check(engine)}
    flat = [flat for flat in flat_tensors(engine) if flat.fragments][-1]
    last = flat.fragments[-1].offset + flat.fragments[-1].length - 1
    for place, value in (("weights", torch.nan), ("state", -torch.inf)) if gather(flat.files is not None)[-1] else ():
        with _poisoned(engine, flat, place, last, value):
            results[place] = _write_and_check(engine)
    padding = gather(_padding(flat))[-1]
    if padding is not None:
        with _poisoned(engine, flat, "weights", padding, torch.nan):
            results["padding"] = _write_and_check(engine)
    return results


def _padding(flat: FlatTensor) -> int | None:
    """Return the index of an element between two fragments; None without padding."""
    ends = [fragment.offset + fragment.length for fragment in flat.fragments]
    return next((end for end, after in zip(ends, flat.fragments[1:], strict=False) if end < after.offset), None)


def _write_and_check(engine: DeepSpeedEngine) -> list[bool]:
    """Write the checkpoint's files to memory, and return each rank's result."""
    memory = Snapshot()
    error, finite = write_files(engine, Path("global_step0").absolute(), lambda path: memory.open_file(path.name),
                                step=0, consumed_samples=0)
    assert error is None
    memory.close()
    return gather(finite)


@contextlib.contextmanager
def _poisoned(engine: DeepSpeedEngine, flat: FlatTensor, place: str, index: int, value: float) -> Iterator[None]:
    """Set one element on the last rank, and restore it at the end of the block."""
    before = _exchange(engine, flat, place, index, value)
    yield
    _exchange(engine, flat, place, index, before)


def _exchange(engine: DeepSpeedEngine, flat: FlatTensor, place: str, index: int, value: float) -> float:
    """Set one element of the flat tensor or of a state of the same size on the last rank. Return its old value."""
    on_nvme = flat.parameter.numel() == 0
    if on_nvme:
        engine.optimizer._optimizer_states_and_gradient_swap_in(flat.number)
        flat = flat_tensors(engine)[flat.number]
    tensors = [flat.parameter] if place == "weights" else \
        [tensor for tensor in base_optimizer(engine).state[flat.parameter].values()
         if torch.is_tensor(tensor) and tensor.numel() == flat.numel]
    before = 0.0
    if tensors and dist.get_rank() == dist.get_world_size() - 1:
        elements = tensors[-1].detach().view(-1)
        before = float(elements[index])
        elements[index] = value
    if on_nvme:
        engine.optimizer._optimizer_states_and_gradient_swap_out(flat.number)
    return before
