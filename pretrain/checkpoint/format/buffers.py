"""Buffers of transformers' modules that belong to a model's state, such as the biases by which routers balance experts.

No optimizer changes them. They are small, so that every model-states file of a checkpoint has all of them, under this
project's names, in DeepSpeed's client state. A checkpoint of weights alone has them in a file of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from pretrain.distributed.collectives import gather

BUFFERS = "buffers"  # key in a model-states file
BUFFERS_FILE = "buffers.safetensors"  # of a checkpoint of weights alone, which has no model-states file


@runtime_checkable
class WithBuffers(Protocol):
    """A layer with buffers that belong to the model's state."""

    def persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them by their names in this layer."""


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent floating-point buffers of this rank's layers, by name."""
    return {f"{prefix}.{name}": buffer for prefix, layer in module.named_modules() if isinstance(layer, WithBuffers)
            for name, buffer in layer.persistent_buffers()}


def gather_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of all ranks on the CPU; collective."""
    own = {name: buffer.detach().cpu() for name, buffer in own_buffers(module).items()}
    return {name: buffer for of_rank in gather(own) for name, buffer in of_rank.items()}


def fill_buffers(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Copy saved values into the buffers of this rank's layers. Those without a saved value keep theirs."""
    for name, buffer in own_buffers(module).items():
        if name in saved:
            buffer.copy_(saved[name])
