"""Faults that are planted into a training run on real engines, and the run of many cases in one launch.

A case of workers/plant_worker.py is a run of `trainer.train`: {"name", "config" (DeepSpeed JSON), "flags", "after",
"plant", "last_step"}. `after` is the name of a case, whose run folder is copied first, so that training continues from
its newest checkpoint. The run folder is `run-NAME`. With `last_step`, the run ends after this step without a save.

A plant is {"kind", "rank", "step", ...}:

    weight    flips `bit` of a parameter whose name ends with `name`, before the step
    state     flips `bit` of an optimizer state, or of "master", `name`
    operator  the layer `name` adds `value` to an element of its output: in this step only, or with "persistent": true
              in all later ones
    gradient  flips `bit` of the gradient of a parameter whose name ends with `name`, before the reduction
    reduced   flips `bit` of this rank's part of the reduced gradients
    token     increments a token of the micro-batch
    lr        multiplies the learning rate by `value`, on all ranks
    random    draws a random number that no other run draws
    nan       the loss is NaN, on all ranks
    request   the file RECORD appears in the run folder `run`
    kill      SIGKILL, after the step

Bits are counted from the lowest one, negative ones from the highest. A plant that finds nothing to change fails, and
one that has changed values says where: `Planter.acted`.
"""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.callback import Callback, Run
from pretrain.checkpoint.format.fragments import held_states
from pretrain.data.loader import Loader, MicroBatch
from pretrain.engine.attachments import attachments
from pretrain.engine.checksums import held_parameters, reduced_gradients
from pretrain.engine.optimizer import set_learning_rate
from pretrain.engine.steps import learning_rate
from pretrain.engine.update_guard import UpdateGuard

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element

Plant = dict[str, Any]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of an element that is not 0 or nearly 0: a changed bit of such an element might change nothing."""
    flat = tensor.detach().view(-1)
    words, bits = flat.view(_INTEGERS[tensor.element_size()]), 8 * tensor.element_size()
    assert -bits <= bit < bits, f"{tensor.dtype} has no bit {bit}"
    bit %= bits
    places = flat.abs().gt(torch.finfo(tensor.dtype).tiny).nonzero()
    place = int(places[len(places) // 2])
    words[place] ^= -1 << bit if bit == bits - 1 else 1 << bit


def _named(tensors: dict[str, Any], end: str) -> tuple[str, Any]:
    return next((name, tensor) for name, tensor in tensors.items() if name.endswith(end))


def _layer(engine: DeepSpeedEngine, name: str) -> torch.nn.Module:
    return engine.module.get_submodule(name)


class Planter(Callback):
    """Plants one fault into the run of this rank."""

    order = 0  # before anything that records the step

    def __init__(self, plant: Plant | None) -> None:
        self._plant = plant or {"kind": "none", "step": 0}
        self.acted: list[str] = []  # names of the layers or tensors that were changed on this rank
        self._hooks: list[Any] = []
        self._is_wrapped = False

    def before_step(self, run: Run, micro_batches: list[MicroBatch]) -> None:
        """Plant the fault if it is due. The plant counts steps of the run."""
        engine = run.engine
        plant, step = self._plant, engine.global_steps + 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        is_due = step == plant["step"] or (plant.get("persistent") and step > plant["step"])
        if not is_due or plant.get("rank", dist.get_rank()) != dist.get_rank():
            return
        if plant["kind"] == "weight":
            name, weight = _named(held_parameters(engine), plant["name"])
            self._flip(name, weight)
        elif plant["kind"] == "state":
            states = held_states(engine)
            assert states is not None
            self._flip(plant["name"], max(states[plant["name"]], key=torch.count_nonzero))
        elif plant["kind"] == "operator":
            self._hooks = [_layer(engine, plant["name"]).register_forward_hook(self._wrong_output)]
        elif plant["kind"] == "gradient":
            name, parameter = _named(dict(engine.module.named_parameters()), plant["name"])
            self._hooks = [parameter.register_hook(partial(self._flipped_gradient, name))]
        elif plant["kind"] == "reduced":
            self._flip_reduced(engine)
        elif plant["kind"] == "lr":
            before = learning_rate(engine)
            set_learning_rate(engine, before * plant["value"])
            self._check("lr", learning_rate(engine) != before)
        elif plant["kind"] == "random":
            torch.rand(1)
            self._check("random", True)
        elif plant["kind"] == "request":
            (Path(plant["run"]) / "RECORD").touch()

    def _check(self, name: str, has_changed: bool) -> None:
        """Record that the plant has acted. Raises AssertionError if it has not."""
        assert has_changed, f"the plant {self._plant} changes nothing"
        self.acted.append(name)

    def _flip(self, name: str, tensor: torch.Tensor) -> None:
        before = tensor.detach().clone()
        flip(tensor, self._plant["bit"])
        self._check(name, not torch.equal(before, tensor))

    def _wrong_output(self, layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed[..., output.shape[-2] // 2, 3] += self._plant.get("value", 1.0)
        self._check(self._plant["name"], not torch.equal(changed, output))
        return changed

    def _flipped_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone().contiguous()
        self._flip(name, changed)
        return changed

    def _flip_reduced(self, engine: DeepSpeedEngine) -> None:
        """Flip the bit in the next update only, before anything reads the gradients."""
        guard = attachments(engine).update.find(UpdateGuard)
        assert guard is not None
        before = guard.before_update

        def flips_first() -> None:
            guard.before_update = before  # type: ignore[method-assign]
            self._flip("reduced", max(reduced_gradients(engine), key=torch.count_nonzero))
            before()

        guard.before_update = flips_first  # type: ignore[method-assign]

    def end_step(self, run: Run) -> None:
        """Kill this rank if that is planted, after a step since the start of this process."""
        plant = self._plant
        if plant["kind"] == "kill" and run.steps_here == plant["step"] and dist.get_rank() == plant["rank"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_data(self) -> Any:
        """Return a context in which the loader of the training data gives the planted micro-batches."""
        plant, original = self._plant, Loader.step

        def spoiled(loader: Loader, consumed_samples: int) -> list[MicroBatch]:
            micro_batches = original(loader, consumed_samples)
            is_due = loader.dataset.name == "train" and consumed_samples == plant.get("consumed_samples")
            if is_due and plant.get("rank", dist.get_rank()) == dist.get_rank():
                for tokens_BT, weights_BT in _parts(micro_batches):
                    if plant["kind"] == "token":
                        tokens_BT[0, 5] = (tokens_BT[0, 5] + 1) % 250
                    elif plant["kind"] == "nan":
                        weights_BT.mul_(float("nan"))
                    self.acted.append(plant["kind"])
                    break
            return micro_batches

        return patch.object(Loader, "step", spoiled)


def _parts(micro_batches: list[MicroBatch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for inputs, (_, weights_BT) in micro_batches:
        yield inputs if torch.is_tensor(inputs) else inputs[0], weights_BT
