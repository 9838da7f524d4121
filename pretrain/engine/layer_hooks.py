"""Hooks on the layers of a rank: on their outputs, and on the gradients of their parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn
from torch.utils.hooks import RemovableHandle


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
