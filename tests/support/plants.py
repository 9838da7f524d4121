"""Faults that are planted into a training run on real engines, and the run of many cases in one launch.

A case of workers/plant_worker.py is a run of `trainer.train`: {"name", "config" (DeepSpeed JSON), "flags", "after",
"plant"}. `after` is the name of a case, whose run folder is copied first, so that training continues from its newest
checkpoint. The run folder is `run-NAME`.

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
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.fragments import held_states
from pretrain.data.loader import Loader, MicroBatch
from pretrain.engine.attachments import attachments
from pretrain.engine.checksums import held_parameters, reduced_gradients
from pretrain.engine.optimizer import set_learning_rate
from pretrain.engine.steps import learning_rate
from pretrain.paths import RECORD_FILE

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element

Plant = dict[str, Any]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of the middle element, counted from the lowest bit."""
    words = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
    words[len(words) // 2] ^= -1 << bit if bit == 8 * words.element_size() - 1 else 1 << bit


def _named(tensors: dict[str, Any], end: str) -> Any:
    return next(tensor for name, tensor in tensors.items() if name.endswith(end))


def _layer(engine: DeepSpeedEngine, name: str) -> torch.nn.Module:
    return engine.module.get_submodule(name)


def _wrong_output(plant: Plant) -> Callable[..., torch.Tensor]:
    def hook(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., output.shape[-2] // 2, 3] += plant.get("value", 1.0)
        return output

    return hook


def _flipped_gradient(plant: Plant) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone().contiguous()
        flip(changed, plant["bit"])
        return changed

    return hook


class Planter:
    """Plants one fault into the run of this rank. Its methods are called before and after each step."""

    def __init__(self, plant: Plant | None) -> None:
        self._plant = plant or {"kind": "none", "step": 0}
        self._hooks: list[Any] = []
        self._is_wrapped = False

    def before_step(self, number: int, engine: DeepSpeedEngine) -> None:
        """Plant the fault if it is due. `number`: see StepCallbacks; the plant counts steps of the run."""
        plant, step = self._plant, engine.global_steps + 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        is_due = step == plant["step"] or (plant.get("persistent") and step > plant["step"])
        if not is_due or plant.get("rank", dist.get_rank()) != dist.get_rank():
            return
        if plant["kind"] == "weight":
            flip(_named(held_parameters(engine), plant["name"]), plant["bit"])
        elif plant["kind"] == "state":
            states = held_states(engine)
            assert states is not None
            flip(states[plant["name"]][0], plant["bit"])
        elif plant["kind"] == "operator":
            self._hooks = [_layer(engine, plant["name"]).register_forward_hook(_wrong_output(plant))]
        elif plant["kind"] == "gradient":
            parameter = _named(dict(engine.module.named_parameters()), plant["name"])
            self._hooks = [parameter.register_hook(_flipped_gradient(plant))]
        elif plant["kind"] == "reduced":
            self._flip_reduced(engine)
        elif plant["kind"] == "lr":
            set_learning_rate(engine, learning_rate(engine) * plant["value"])
        elif plant["kind"] == "random":
            torch.rand(1)
        elif plant["kind"] == "request":
            (Path(plant["run"]) / RECORD_FILE).touch()

    def _flip_reduced(self, engine: DeepSpeedEngine) -> None:
        """Flip the bit in the next update only, before anything reads the gradients."""
        guard = attachments(engine).update.guard
        assert guard is not None
        before = guard.before

        def flips_first() -> None:
            guard.before = before  # type: ignore[method-assign]
            gradients = reduced_gradients(engine)
            flip(max(gradients, key=torch.Tensor.numel), self._plant["bit"])
            before()

        guard.before = flips_first  # type: ignore[method-assign]

    def after_step(self, number: int, print_line: Callable[[str], None]) -> None:
        """Kill this rank if that is planted. `number`: of the step since the start of this process."""
        if self._plant["kind"] == "kill" and number == self._plant["step"] and dist.get_rank() == self._plant["rank"]:
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
                    break
            return micro_batches

        return patch.object(Loader, "step", spoiled)


def _parts(micro_batches: list[MicroBatch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for inputs, (_, weights_BT) in micro_batches:
        yield inputs if torch.is_tensor(inputs) else inputs[0], weights_BT
