"""Runs of the forward function of a skeleton (pretrain/model/skeleton.py) with other modules.

The forward function of the model computes what lies between the modules: positions, masks, rotary tables, scales, the
order of the calls. `Runner.run` executes it with a handler for each watched module, so that a part of the model can be
computed with real modules, and the rest is skipped.
"""

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

Handler = Callable[..., Any]


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
