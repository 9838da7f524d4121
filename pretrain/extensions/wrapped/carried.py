"""Arguments of decoder layers that depend on the tokens: they travel with the hidden states, as more elements of them.

A pipeline stage gets one tensor. In a model with such arguments it is [B, T, D + C]: the D elements of the hidden
states (of all streams, if there are several), then the C elements of the carried tensors that this or a later layer
needs.
Token ids are carried as three digits of base 256, which 16-bit floating-point numbers hold exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

DIGITS, _BASE = 3, 256


@dataclass(frozen=True)
class Carried:
    """A tensor that the model's forward function computes from the tokens, and passes to decoder layers."""

    shape: tuple[int, ...]  # after batch and positions
    is_integer: bool  # token ids
    uses: tuple[tuple[int, str], ...]  # decoder layers, and the names of the argument

    @property
    def width(self) -> int:
        """Number of elements for each position."""
        return prod(self.shape) * (DIGITS if self.is_integer else 1)

    @property
    def last_use(self) -> int:
        return max(layer for layer, _ in self.uses)


def width_at(carried: Iterable[Carried], layer: int) -> int:
    """Return the number of carried elements that decoder layer `layer` or a later one needs."""
    return sum(each.width for each in carried if each.last_use >= layer)


def digits_of(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return whole numbers [...] as digits [..., 3]."""
    return torch.stack([ids // _BASE**power % _BASE for power in reversed(range(DIGITS))], -1).to(dtype)


def ids_of(digits: torch.Tensor) -> torch.Tensor:
    """Return the whole numbers of `digits_of`."""
    numbers = digits.detach().to(torch.int64)
    return sum((numbers[..., index] * _BASE ** (DIGITS - 1 - index) for index in range(DIGITS)),
               torch.zeros_like(numbers[..., 0]))


def pack(hidden: torch.Tensor, carried: tuple[Carried, ...], tensors: dict[Carried, torch.Tensor]) -> torch.Tensor:
    """Return the hidden states and the carried tensors of the first decoder layer as one tensor."""
    rows = hidden.shape[:2]
    parts = [digits_of(tensors[each], hidden.dtype) if each.is_integer else tensors[each].to(hidden.dtype)
             for each in carried]
    return torch.cat([hidden.flatten(2), *(each.expand(*rows, *each.shape[2:]).flatten(2) for each in parts)], -1)


def unpack(x: torch.Tensor, hidden_shape: tuple[int, ...], carried: tuple[Carried, ...],
           layer: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Return the hidden states of decoder layer `layer`, its arguments by name, and what later layers need.

    `carried` is in the order of last uses, the latest first.
    """
    start = prod(hidden_shape)
    hidden, arguments = x[..., :start].unflatten(2, hidden_shape), {}
    for each in carried:
        if each.last_use < layer:
            break
        names = [name for used, name in each.uses if used == layer]
        if names:
            part = x[..., start: start + each.width].unflatten(2, (*each.shape, DIGITS) if each.is_integer else
                                                               each.shape or (1,))
            value = ids_of(part) if each.is_integer else part if each.shape else part.squeeze(-1)
            arguments.update(dict.fromkeys(names, value))
        start += each.width
    kept = prod(hidden_shape) + width_at(carried, layer + 1)
    return hidden, arguments, x[..., prod(hidden_shape): kept]
