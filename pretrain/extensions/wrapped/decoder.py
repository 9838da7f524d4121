"""A transformers model and its parts, which all layers of a run share: copies of modules, arguments, first weights.

`find_layers` finds the layers with their parameters, buffers and windows.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch import nn

from pretrain.extensions.wrapped.parts import Parts, bound_arguments, find_parts
from pretrain.extensions.wrapped.runner import Handler, Runner, Stop, copied
from pretrain.model.description import Layer, ModelConfig, Parameter
from pretrain.model.own_models import own_model, transformers_config
from pretrain.model.skeleton import create_skeleton

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
_OF_EXPERTS = re.compile(r"(^|[._])experts?([._]|$)")
_KEPT_SHAPES = 4  # batch shapes whose arguments are kept: training, evaluation, a schedule of lengths
Arguments = dict[str, Any]


def find_layers(model: Any, parts: Parts) -> tuple[Layer, ...]:
    """List the layers of a skeleton with their parameters."""
    vocabulary = tuple(model.get_submodule(parts.embedding).weight.shape)
    matrix = Parameter("embedding", vocabulary)
    layers = [Layer("embedding", "TokenEmbedding", (matrix,), parts.tied, their_names=(f"{parts.embedding}.weight",))]
    if parts.changes_embedding:
        layers.append(_layer(model, "norm", "EmbeddingNorm", parts.prologue, own_name))
    layers += [replace(_layer(model, "block", "Block", (path,), lambda path: "layer"), window=_window(model, index))
               for index, path in enumerate(parts.blocks)]
    layers.append(_layer(model, "norm", "FinalNorm", parts.epilogue, own_name))
    if parts.tied:
        return (*layers, Layer("head", "TokenEmbedding", (matrix,), tied=True, their_names=(f"{parts.head}.weight",)))
    return (*layers, _layer(model, "head", "LossHead", (parts.head,), lambda path: "lm_head"))


def own_name(path: str) -> str:
    """Return the name under which a layer holds the module of a path: without dots, which torch does not allow."""
    return path.replace(".", "_")


def _layer(model: Any, kind: str, class_name: str, paths: tuple[str, ...], name_of: Callable[[str], str]) -> Layer:
    found = [(f"{path}.{name}", Parameter(f"{name_of(path)}.{name}", tuple(parameter.shape),
                                          active=_active(model.config, f"{name_of(path)}.{name}", parameter.shape),
                                          is_frozen=not parameter.requires_grad))
             for path in paths for name, parameter in model.get_submodule(path).named_parameters()]
    buffers = [(f"{name_of(path)}.{name}", tuple(buffer.shape), f"{path}.{name}")
               for path in paths for name, buffer in persistent_buffers(model.get_submodule(path))]
    return Layer(kind, class_name, tuple(parameter for _, parameter in found),
                 their_names=tuple(theirs for theirs, _ in found),
                 buffers=tuple(Parameter(name, shape) for name, shape, _ in buffers),
                 their_buffers=tuple(theirs for _, _, theirs in buffers))


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point buffers of a module that its state_dict has, by name."""
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in each._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer


def _window(model: Any, block: int) -> int:
    """Return the number of latest tokens that a token sees in a decoder layer, by its type; 0: all tokens.

    Convolutions and recurrent layers compute no scores for other tokens, and count as a window of one token.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[block] if block < len(kinds) else "full_attention"
    if "sliding" in kind or "chunked" in kind:
        return first_size(config, ("sliding_window", "attention_chunk_size"), 0)
    return 0 if "attention" in kind and "linear" not in kind else 1


def _active(config: Any, name: str, shape: tuple[int, ...]) -> int | None:
    """Return the number of elements that process a token, if they belong to experts of which a router chooses some."""
    config = config.get_text_config(decoder=True)
    experts, chosen = (first_size(config, names, 0) for names in (_NUM_EXPERTS, _EXPERTS_PER_TOKEN))
    if not 0 < chosen < experts or not _OF_EXPERTS.search(name) or "shared" in name:
        return None
    return prod(shape) * chosen // experts


def first_size(config: Any, names: tuple[str, ...], default: int) -> int:
    """Return the first attribute that is a positive whole number."""
    own = vars(config)  # getattr fails for a key of which layers have values of their own
    found = (own[key] if (key := config.attribute_map.get(name, name)) in own else getattr(config, name, None)
             for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), default)


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
    initialize = {"": model._init_weights}  # by the innermost model that contains a module
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
