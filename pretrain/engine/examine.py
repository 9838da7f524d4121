"""Hooks on the layers of a rank, and training steps outside of the step loop: for checks and examinations."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch import nn
from torch.utils.hooks import RemovableHandle

from pretrain.data.loader import MicroBatch
from pretrain.engine.optimizer import set_learning_rate
from pretrain.engine.steps import tensor_parallel_size, train_batch
from pretrain.engine.update_guard import FP16_OVERFLOW, SkippedUpdate, skipped_update


def layers_of(module: Any) -> dict[str, nn.Module]:
    """Return the layers of a plain module or pipeline stage, in the order in which they are first called.

    The names are those with which the names of their parameters begin: see `layer_of`.
    """
    functions = module.forward_funcs if isinstance(module, PipelineModule) else module.layers
    names = {id(each): name for name, each in module.named_modules()}
    layers = [each.args[0] if isinstance(each, partial) else each for each in functions]  # a tied head is a partial
    return {names[id(layer)]: layer for layer in layers if isinstance(layer, nn.Module)}


def operators_of(module: Any) -> dict[str, nn.Module]:
    """Return the modules with parameters inside of the layers by their names, such as "3.mlp.up".

    Others, such as dropout, are called several times in a layer. A compiled block has none.
    """
    return {f"{name}.{inside}": each for name, layer in layers_of(module).items()
            if not getattr(layer, "is_compiled", False)
            for inside, each in layer.named_modules() if inside and next(each.parameters(), None) is not None}


def layer_of(parameter: str) -> str:
    """Return the name of the layer that a parameter belongs to: "3", or "tied_modules.embed"."""
    parts = parameter.split(".")
    return ".".join(parts[:2] if parts[0] == "tied_modules" else parts[:1])


def add_hooks(module: nn.Module, of_output: Callable[[str, torch.Tensor], None],
              of_gradient: Callable[[str, torch.Tensor], torch.Tensor | None]) -> list[RemovableHandle]:
    """Add hooks, and return their handles.

    Args:
        of_output: called with the name of a layer and its activations.
        of_gradient: called with the name of a parameter and the gradient of a micro-batch; may return another gradient.
    """
    def after(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        of_output(name, first_tensor(output))

    return [*(layer.register_forward_hook(partial(after, name)) for name, layer in layers_of(module).items()),
            *(parameter.register_hook(partial(of_gradient, name))
              for name, parameter in module.named_parameters() if parameter.requires_grad)]


def first_tensor(output: Any) -> torch.Tensor:
    """Return the activations in the output of a layer or pipeline stage: with documents, stages pass (x, positions)."""
    found: torch.Tensor = output if torch.is_tensor(output) else output[0]
    return found


_MOST_OVERFLOWS = 30  # of fp16's loss scale, which is halved after each


def train_without_overflow(engine: DeepSpeedEngine, batches: list[MicroBatch],
                           lr: float | None = None) -> tuple[float, SkippedUpdate | None]:
    """Repeat a training step until fp16 does not overflow: each overflow halves the loss scale.

    `lr`: the learning rate; None: the engine's. Returns the loss, and why the update was skipped.
    """
    for _ in range(_MOST_OVERFLOWS):
        if lr is not None:
            set_learning_rate(engine, lr)
        loss, skipped = float(train_batch(engine, batches)), skipped_update(engine)
        if skipped is None or skipped.reason != FP16_OVERFLOW or skipped.is_bad:
            break
    return loss, skipped


def norm_of_all_parts(engine: DeepSpeedEngine, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> float:
    """Return the norm of the complete gradient, of which each tensor-parallel rank may hold a part; collective."""
    square = gradient.detach().float().square().sum()
    if is_model_parallel_parameter(parameter) and tensor_parallel_size(engine) > 1:
        dist.all_reduce(square, group=bwc_tensor_model_parallel_group(engine.mpu))
    return math.sqrt(square)
