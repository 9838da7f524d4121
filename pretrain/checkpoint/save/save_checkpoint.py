"""Save a checkpoint with DeepSpeed's engine, atomically: write a folder under a temporary name, then rename it.

A folder `global_stepN` holds DeepSpeed's own files, `manifest.json`, and for each rank `rng_state_rank_RRRRR.pt` and
`shard_index_rank_RRRRR.json`, which locates each weight and optimizer state. `FileEngine` gives DeepSpeed the files to
write to: on disk, or in a snapshot in host memory.

It finds NaN and infinity in the tensors that a rank writes, on the devices where the tensors are: only as they are
pickled, each engine's state is complete (weights, master weights and optimizer states, also those that were read back
from NVMe for the checkpoint). `torch.aminmax` reads a tensor once and propagates NaN. On a CPU it is several times as
fast as an infinity norm or `isfinite` (torch 2.x), and as SHA-256.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import nn

from pretrain.checkpoint.format.fragments import FlatTensor, flat_tensors
from pretrain.checkpoint.format.hashed_files import FileGroup
from pretrain.checkpoint.format.manifest import Manifest, manifest_of
from pretrain.checkpoint.format.pickles import load_pickle, rng_file, rng_state, without_enums
from pretrain.checkpoint.format.shard_index import BUFFERS, index_json, index_name, own_buffers
from pretrain.checkpoint.save.commit import (
    check_space,
    commit,
    discard,
    finish_part,
    next_checkpoint_bytes,
    save_errors,
    temporary_folder,
)
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import from_rank_0, gather, gather_problems
from pretrain.engine.recipe import recipe_states
from pretrain.engine.steps import loss_scale_state, settle
from pretrain.errors import SaveError

Keys = tuple[str | int, ...]
_VISIBLE_S = 60  # time in which files of other hosts must become visible on this host after they were written


class Writable(Protocol):
    """The methods of a file that `torch.save` calls."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


OpenFile = Callable[[Path], AbstractContextManager[Writable]]


class FiniteCheck:
    """Accumulates the extreme values of all floating-point tensors that one rank writes.

    Args:
        flats: flat tensors of the engine. Their padding is not checked: at ZeRO stage 3 it is uninitialized memory
            (DeepSpeed 0.19.8, zero/partition_parameters.py, `_partition_param` fills a `torch.empty`).
    """

    def __init__(self, flats: Iterable[FlatTensor] = ()) -> None:
        self._padded: dict[tuple[str, Keys], FlatTensor] = {}
        for flat in flats:
            if sum(fragment.length for fragment in flat.fragments) < flat.numel:
                self._padded |= {(place.file, place.keys): flat for place in flat.files or ()}
        self._extremes: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    @torch.no_grad()
    def add(self, file: str, value: Any) -> None:
        """Check the tensors in nested dicts, lists and tuples that are pickled into `file`. Waits for no device."""
        for keys, tensor in _tensors(value, ()):
            for part in self._without_padding(file, keys, tensor):
                self._extremes.setdefault((part.device, part.dtype), []).extend(torch.aminmax(part))
        self._extremes = {kind: [*torch.aminmax(torch.stack(extremes))] for kind, extremes in self._extremes.items()}

    def _without_padding(self, file: str, keys: Keys, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a tensor without padding, and without empty tensors."""
        flat = self._padded.get((file, keys)) or self._padded.get((file, keys[:-1]))
        if flat is None or flat.numel != tensor.numel():  # a state such as Adam's step count has another size
            if tensor.numel() > 0:
                yield tensor.detach()
            return
        for fragment in flat.fragments:
            yield tensor.detach().view(-1)[fragment.offset:fragment.offset + fragment.length]

    def is_finite(self) -> bool:
        """Return whether no tensor had NaN or infinity. Waits for the device once for each data type."""
        return all(bool(torch.stack(extremes).cpu().isfinite().all()) for extremes in self._extremes.values())


def _tensors(value: Any, keys: Keys) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield the floating-point tensors in nested dicts, lists and tuples, with their keys."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield keys, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*keys, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, (*keys, index))


class FileEngine(CheckpointEngine):
    """Replacement for `engine.checkpoint_engine`, the object through which DeepSpeed saves and loads files.

    `save` does not raise OSError, RuntimeError or MemoryError, because the other ranks wait in DeepSpeed's barriers.
    The first such error is recorded in `error`; after this, `save` and `write` do nothing.

    Args:
        open_file: opens the file that receives the bytes for a path: on disk, or in a snapshot in host memory. With
            None, the engine can only load.
        finite: checks the tensors of each object that `save` pickles.
    """

    def __init__(self, open_file: OpenFile | None = None, finite: FiniteCheck | None = None) -> None:
        super().__init__()
        self.name = "ds-pretrain"
        self.error: str | None = None
        self._open_file, self._finite = open_file, finite
        self._first_load: tuple[str, Any] | None = None  # a path, and the content that was loaded from it

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing, because the folder exists already."""

    def save(self, state_dict: Any, path: str) -> None:
        finite = self._finite or FiniteCheck()

        def fill(file: Writable) -> None:
            with ThreadPoolExecutor(1, thread_name_prefix="finite") as pool:  # while this thread waits for the disk
                checked = pool.submit(finite.add, Path(path).name, state_dict)
                save_pickle(state_dict, file)
            checked.result()

        self.write(Path(path), fill)

    def write(self, path: Path, fill: Callable[[Writable], object]) -> None:
        """Open the file for `path` and call `fill` with it. A lack of disk or memory is recorded in `error`."""
        if self.error is not None:
            return
        assert self._open_file is not None, "FileEngine() without open_file can only load"
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # the SHA-256 in the manifest replaces it
        try:
            with self._open_file(path) as file:
                fill(file)
        except (OSError, RuntimeError, MemoryError) as error:  # torch's zip writer raises RuntimeError for an OSError
            self.error = f"{path.name}: {_first_error(error)}"
        finally:
            torch.serialization.set_crc32_options(crc32)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file. Two calls in a row for the same path read the file once.

        DeepSpeed 0.19.8 loads a model-states or layer file, drops the content, and loads the file again
        (runtime/state_dict_factory.py, check_ckpt_list and load).
        """
        first, self._first_load = self._first_load, None
        if first is not None and first[0] == path:
            return first[1]
        content = load_pickle(Path(path))
        self._first_load = path, content
        return content

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def save_pickle(value: Any, file: Writable) -> None:
    """Write `value` with torch.save, without enums, so that the weights-only unpickler can load it (pickles.py)."""
    torch.save(without_enums(value), file)  # type: ignore[arg-type] # torch.save calls only `write` and `flush`


def _first_error(error: BaseException) -> str:
    """Return the first line of the message of the exception that started a chain of exceptions.

    This is the first OSError, if there is one: on a full disk, torch's zip writer adds RuntimeErrors about positions.
    """
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    first = next((one for one in reversed(chain) if isinstance(one, OSError)), chain[-1])
    return str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__


def begin_save(plan: Plan, checkpoints: Path, step: int) -> tuple[Path, str]:
    """Create the temporary folder and return it with a save_id; collective. Raises SaveError if disk space is short."""

    def begin() -> tuple[Path, str]:
        temporary = temporary_folder(checkpoints, step)
        with save_errors(temporary):
            discard(temporary)  # left by a run that was killed
            checkpoints.mkdir(parents=True, exist_ok=True)
            check_space(checkpoints, needed_bytes=next_checkpoint_bytes(plan, checkpoints))
            temporary.mkdir()
        return temporary, secrets.token_hex(8)

    return from_rank_0(begin)


def write_files(engine: DeepSpeedEngine, temporary: Path, open_file: OpenFile, *, step: int,
                consumed_samples: int) -> tuple[str | None, bool]:
    """Write this rank's files through `open_file`; collective.

    Returns the error of this rank, or None, and whether all tensors in its files are finite.
    """
    settle(engine)
    finite = FiniteCheck(flat_tensors(engine))
    files = FileEngine(open_file, finite)
    engine.checkpoint_engine = files
    copy_recovery_script = type(engine)._copy_recovery_script
    client_state: dict[str, Any] = {"step": step, "consumed_samples": consumed_samples}
    if buffers := _gather_buffers(engine.module):
        client_state[BUFFERS] = buffers
    # on a full disk this method of DeepSpeed raises on rank 0 only, while the other ranks wait in a barrier
    engine._copy_recovery_script = lambda _: None
    engine.save_checkpoint(str(temporary.parent), tag=temporary.name, save_latest=False,
                           client_state=client_state)
    rank = dist.get_rank()
    if rank == 0:
        with contextlib.suppress(OSError):
            copy_recovery_script(engine, str(temporary.parent))
    files.write(rng_file(temporary, rank), lambda file: save_pickle(rng_state(), file))
    index = index_json(engine).encode()
    files.write(temporary / index_name(rank), lambda file: file.write(index))
    return files.error, finite.is_finite()


def _gather_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of all ranks on the CPU; collective."""
    own = {name: buffer.detach().cpu() for name, buffer in own_buffers(module).items()}
    return {name: buffer for of_rank in gather(own) for name, buffer in of_rank.items()}


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    folder: Path
    manifest: Manifest


def save_checkpoint(engine: DeepSpeedEngine, plan: Plan, checkpoints: Path, *, step: int, consumed_samples: int,
                    versions: dict[str, str], eval_loss: float | None = None) -> SavedCheckpoint:
    """Write `checkpoints/global_stepSTEP`, then update `latest`; collective. Earlier checkpoints are not changed.

    If any rank cannot write its files, the temporary folder is removed and SaveError is raised on every rank.
    """
    temporary, save_id = begin_save(plan, checkpoints, step)
    with FileGroup() as group:
        error, finite = write_files(engine, temporary, group.open_file, step=step, consumed_samples=consumed_samples)
        if error is None:
            error = finish_part(temporary, rank=dist.get_rank(), save_id=save_id, finish=group.finish, finite=finite)
    errors = gather_problems([f"rank {dist.get_rank()}: {error}"] if error else [])
    manifest = manifest_of_engine(engine, plan, step=step, consumed_samples=consumed_samples, versions=versions,
                                  eval_loss=eval_loss, save_id=save_id)

    def finish() -> SavedCheckpoint:
        if errors:
            discard(temporary)
            raise SaveError("; ".join(errors))
        return SavedCheckpoint(checkpoints / f"global_step{step}", commit(temporary, manifest, timeout_s=_VISIBLE_S))

    return from_rank_0(finish)


def manifest_of_engine(engine: DeepSpeedEngine, plan: Plan, *, step: int, consumed_samples: int,
                       versions: dict[str, str], eval_loss: float | None, save_id: str) -> Manifest:
    """Return the manifest of the engine's current state, with empty `files`."""
    return manifest_of(plan, step=step, consumed_samples=consumed_samples, versions=versions, eval_loss=eval_loss,
                       loss_scale=loss_scale_state(engine), recipe_states=recipe_states(engine), save_id=save_id)
