"""A transformers model and its parts, which all layers of a run share: copies of modules, arguments, first weights."""

import contextlib
import json
import zlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from pretrain.extensions.wrapped.find_layers import find_layers
from pretrain.extensions.wrapped.parts import bound_arguments, find_parts
from pretrain.extensions.wrapped.runner import Handler, Runner, Stop, copied
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.own_models import own_model, transformers_config
from pretrain.model.skeleton import create_skeleton

_KEPT_SHAPES = 4  # batch shapes whose arguments are kept: training, evaluation, a schedule of lengths
Arguments = dict[str, Any]


class Decoder:
    """A skeleton, its parts, and runs of its forward function."""

    def __init__(self, model: Any) -> None:
        self.model, self.parts = model, find_parts(model)
        self.layers = find_layers(model, self.parts)
        self._runner = Runner(model, self.parts.watched)
        self._arguments: dict[tuple[Any, ...], list[Arguments]] = {}

    def copy(self, path: str) -> nn.Module:
        """Return a copy of a module, with its buffers, and with parameters on the meta device."""
        return copied(self.model.get_submodule(path), self.model.config)

    @cached_property
    def cast_buffers(self) -> frozenset[str]:
        """Names of the buffers that have the dtype of the parameters; transformers computes all others in fp32.

        Rotary frequencies and the biases of routers are fp32 in 16-bit models, sinusoidal positions are not.
        """
        model = create_skeleton(self.model.config, type(self.model), dtype=torch.bfloat16)
        kept = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}  # transformers keeps them when it loads
        return frozenset(name for name, buffer in model.named_buffers()
                         if buffer.dtype == torch.bfloat16 and not kept & {*name.split(".")})

    def run(self, ids_BT: torch.Tensor, dtype: torch.dtype, handlers: dict[str, Handler], *,
            training: bool = False) -> Any:
        """Execute the model's forward function: `handlers` for some modules, and only shapes for the others."""
        shapes = {path: self._runner.shapes_of(path, dtype) for path in self.parts.watched}
        shapes.update(dict.fromkeys(self.parts.blocks, self._skipped_block))
        cast = self.cast_buffers if dtype != torch.float32 else ()
        return self._runner.run(ids_BT, {**shapes, **handlers}, dtype=dtype, cast_buffers=cast, training=training)

    def _skipped_block(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states that a decoder layer got, in the form in which it returns them."""
        return self.parts.returned(args[0] if args else next(iter(kwargs.values())))

    @torch.no_grad()
    def arguments(self, block: int, x_BTD: torch.Tensor, dtype: torch.dtype) -> Arguments:
        """Return the arguments of decoder layer `block` besides the hidden states, by name.

        They depend on shape, dtype and device alone (parts.py), and are computed once for each.
        """
        key = (*x_BTD.shape[:2], dtype, x_BTD.device)
        if key not in self._arguments:
            while len(self._arguments) >= _KEPT_SHAPES:
                del self._arguments[next(iter(self._arguments))]
            self._arguments[key] = self._compute_arguments(x_BTD, dtype)
        return self._arguments[key][block]

    def _compute_arguments(self, x_BTD: torch.Tensor, dtype: torch.dtype) -> list[Arguments]:
        found: list[Arguments] = []

        def recorder(path: str) -> Handler:
            module = self.model.get_submodule(path)

            def handler(*args: Any, **kwargs: Any) -> Any:
                hidden, named = bound_arguments(module, args, kwargs)
                found.append(named)
                if len(found) == len(self.parts.blocks):
                    raise Stop(None)
                return self.parts.returned(hidden)
            return handler

        with torch.random.fork_rng(devices=[]):
            self.run(token_ids_like(x_BTD), dtype, {path: recorder(path) for path in self.parts.blocks})
        return found

    @torch.no_grad()
    def initial_values(self, layer: Layer, index: int, seed: int) -> dict[str, torch.Tensor]:
        """Return the initial values of a layer's parameters by their names in it: fp32 on the CPU.

        The model's own `_init_weights` draws them, from a generator with a seed for this layer. The other parameters
        are without memory, so that they draw nothing.
        """
        real = {name: torch.full(parameter.shape, torch.nan)
                for name, parameter in zip(layer.their_names, layer.parameters, strict=True)}
        layer_seed = zlib.crc32(f"{seed} layer {index}".encode())
        with _real_parameters(self.model, real), torch.random.fork_rng(devices=[]):
            torch.manual_seed(layer_seed)
            _initialize(self.model, [*real])
        if unset := [name for name, values in real.items() if torch.isnan(values).any()]:
            real.update(self._constructed(unset, layer_seed))
        return {parameter.name: real[name] for name, parameter in zip(layer.their_names, layer.parameters, strict=True)}

    def _constructed(self, names: list[str], seed: int) -> dict[str, torch.Tensor]:
        """Return the values that constructors of modules give to parameters which `_init_weights` leaves alone."""
        numbers = {self.model.get_parameter(name).registration for name in names}
        model = create_skeleton(self.model.config, type(self.model), real=numbers, seed=seed)
        return {name: model.get_parameter(name).detach() for name in names}


@contextlib.contextmanager
def _real_parameters(model: Any, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let the named parameters of a model have memory."""
    before = {name: model.get_parameter(name) for name in values}
    try:
        for name, value in values.items():
            _set_parameter(model, name, nn.Parameter(value))
        yield
    finally:
        for name, parameter in before.items():
            _set_parameter(model, name, parameter)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, own = name.rpartition(".")
    replace_parameter(model.get_submodule(path), own, parameter)


def _initialize(model: Any, names: list[str]) -> None:
    """Call `_init_weights` for all modules that contain the named parameters, the innermost first, as transformers."""
    paths = {""}
    for name in names:
        while name := name.rpartition(".")[0]:
            paths.add(name)
    initialize = {"": model._init_weights}  # of the innermost model that contains a module
    for path in sorted(paths - {""}):
        initialize[path] = getattr(model.get_submodule(path), "_init_weights", initialize.get(_parent(path)))
    for path in sorted(paths, key=lambda path: (-len(path.split(".")) if path else 0, path)):
        initialize[path](model.get_submodule(path))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let `module` use another parameter object. Under zero.Init it is registered elsewhere already."""
    module._parameters[name] = parameter


def token_ids_like(x_BTD: torch.Tensor) -> torch.Tensor:
    """Return token ids for hidden states of some shape; no result depends on them."""
    return torch.ones(x_BTD.shape[:2], dtype=torch.int64, device=x_BTD.device)


def decoder_from(values: dict[str, Any]) -> Decoder:
    """Return the decoder of a config.json's content. One object is kept for each content.

    Raises UnknownPartsError, or what transformers or the user's code raises for these values.
    """
    return _decoder(json.dumps(values, sort_keys=True))


@lru_cache(maxsize=8)
def _decoder(values_json: str) -> Decoder:
    config = transformers_config(json.loads(values_json))
    own = own_model(config.model_type)
    return Decoder(create_skeleton(config, None if own is None else own.model_class))


def decoder_of(config: ModelConfig) -> Decoder:
    """Return the decoder of a wrapped config."""
    return decoder_from(config.hf_config)
