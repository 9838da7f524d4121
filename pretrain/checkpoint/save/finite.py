"""Find NaN and infinity in the tensors that a rank writes, on the devices where the tensors are.

The tensors are checked as they are pickled, because only there each engine's state is complete: weights, master weights
and optimizer states, also those that were read back from NVMe for the checkpoint. `torch.aminmax` reads a tensor once
and propagates NaN. On a CPU it is several times as fast as an infinity norm or `isfinite` (torch 2.x), and as SHA-256.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pretrain.checkpoint.format.fragments import FlatTensor

Keys = tuple[str | int, ...]


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite."""
    return all(math.isfinite(value.item()) for value in tensor.aminmax())  # isfinite() would allocate several tensors


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
                self._padded |= {(place.file, place.keys): flat for place in (flat.weights, flat.states) if place}
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
        return all(bool(torch.stack(extremes).isfinite().all()) for extremes in self._extremes.values())


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
