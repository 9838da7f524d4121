"""The description of a skeleton's layers: parameters, buffers, and what the number of FLOPs depends on."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from pretrain.extensions.wrapped.parts import Parts
from pretrain.model.description import Layer, Parameter

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
_OF_EXPERTS = re.compile(r"(^|[._])experts?([._]|$)")


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
