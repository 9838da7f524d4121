"""Runs of the forward function of a skeleton (pretrain/model/skeleton.py) with other modules, and arguments of layers.

The forward function of the model computes what lies between the modules: positions, masks, rotary tables, scales, the
order of the calls. `Runner.run` executes it with a handler for each watched module, so that a part of the model can be
computed with real modules, and the rest is skipped.

Arguments of decoder layers that depend on the tokens travel with the hidden states, as more elements of them. A
pipeline stage gets one tensor. In a model with such arguments it is [B, T, D + C]: the D elements of the hidden states
(of all streams, if there are several), then the C elements of the carried tensors that this or a later layer needs.
Token ids are carried as three digits of base 256, which 16-bit floating-point numbers hold exactly.
"""

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

Handler = Callable[..., Any]
DIGITS, _BASE = 3, 256


class Stop(Exception):  # noqa: N818 (no error: it ends a forward pass whose result is known)
    """Ends a forward pass of the skeleton early, with a value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def copied(module: nn.Module, config: Any) -> nn.Module:
    """Return a copy of a module of a skeleton. The config is shared, the parameters are on the meta device.

    The buffers are real under FakeTensorMode, too, which cannot copy them.
    """
    with unset_fake_temporarily():
        return copy.deepcopy(module, {id(config): config})


class Runner:
    """A skeleton in which every call of the watched modules is passed to a handler."""

    def __init__(self, model: Any, watched: Iterable[str]) -> None:
        self.model: Any = copied(model, model.config)
        self._handlers: Mapping[str, Handler] = {}
        self._originals: dict[str, Handler] = {}
        self._device, self._dtype = torch.device("cpu"), torch.float32
        accepted = inspect.signature(type(model).forward).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
        self._settings = {"use_cache": False} if takes_all or "use_cache" in accepted else {}
        for path in watched:
            module = self.model.get_submodule(path)
            self._originals[path] = module.forward
            module.forward = self._dispatcher(path)
            move_buffers(module, torch.device("meta"))

    def _dispatcher(self, path: str) -> Handler:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._handlers[path](*args, **kwargs)
        return forward

    def run(self, ids_BT: torch.Tensor, handlers: Mapping[str, Handler], *, dtype: torch.dtype = torch.float32,
            cast_buffers: Container[str] = (), training: bool = False) -> Any:
        """Execute the model's forward function. Return what a handler stopped it with, otherwise the logits.

        Args:
            dtype: of the parameters, for code such as `hidden.to(self.lm_head.weight.dtype)`.
            cast_buffers: names of buffers that have this dtype, too.
        """
        if self.model.training != training:
            self.model.train(training)
        if self._device != ids_BT.device:
            self._device = ids_BT.device
            move_buffers(self.model, self._device)
        if self._dtype != dtype:
            self._dtype = dtype
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(dtype)
            for name, buffer in self.model.named_buffers():
                if name in cast_buffers:
                    buffer.data = buffer.data.to(dtype)
        self._handlers = handlers
        try:
            output = self.model(input_ids=ids_BT, **self._settings)
        except Stop as stop:
            return stop.value
        finally:
            self._handlers = {}
        if torch.is_tensor(output):
            return output
        return output.logits if hasattr(output, "logits") else output[0]

    def shapes_of(self, path: str, dtype: torch.dtype, *, random: bool = False) -> Handler:
        """Return a handler that computes only the shapes of a watched module's outputs: they are zeros, or random."""
        def handler(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return tree_map_only(torch.Tensor, real, self._originals[path](*args, **kwargs))

        def real(shape: torch.Tensor) -> torch.Tensor:
            kind = dtype if shape.is_floating_point() else shape.dtype
            make = torch.randn if random and shape.is_floating_point() else torch.zeros
            return make(shape.shape, dtype=kind, device=self._device)
        return handler


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers that are not on the meta device."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                each._buffers[name] = buffer.to(device)


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
