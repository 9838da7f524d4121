"""Layers of a pipeline or plain module that compute with transformers' own modules (decoder.py), and their specs.

Each layer takes one tensor: token ids or hidden states. What the model's forward function does between the modules is
executed by that function itself, with the modules of this layer in their places.

Shapes: B batch, T positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.utils._pytree import tree_map

from pretrain.extensions.wrapped.decoder import Decoder, own_name, persistent_buffers, replace_parameter, token_ids_like
from pretrain.extensions.wrapped.parts import bound_arguments
from pretrain.extensions.wrapped.runner import (
    DIGITS,
    Carried,
    Handler,
    Stop,
    digits_of,
    ids_of,
    move_buffers,
    pack,
    unpack,
)
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.layers.vocabulary import Head, Labels, LossHead, TrainingLoss, tied_head, tied_loss_head
from pretrain.model.parameters import create_parameters
from pretrain.model.recompute import Recompute


class _Created(nn.Module):
    """Holds new parameters of a layer. zero.Init partitions them when the constructor ends."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        create_parameters(self, {str(index): each for index, each in enumerate(layer.parameters)})


class WrappedLayer(nn.Module):
    """Copies of transformers' modules as submodules, with new parameters."""

    def __init__(self, decoder: Decoder, layer: Layer, paths: dict[str, str]) -> None:
        """`paths`: of the modules in transformers' model, by their names in this layer."""
        super().__init__()
        self.decoder, self._paths = decoder, paths
        for name, path in paths.items():
            self.add_module(name, decoder.copy(path))
        created = [*_Created(layer).parameters()] if layer.parameters else []
        for each, parameter in zip(layer.parameters, created, strict=True):
            module, _, name = each.name.rpartition(".")
            replace_parameter(self.get_submodule(module), name, parameter)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the parameters; None without parameters."""
        return next((parameter.dtype for parameter in self.parameters()), None)

    def persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the floating-point buffers that belong to the model's state, by their names in this layer."""
        return persistent_buffers(self)

    def run(self, ids_BT: torch.Tensor, dtype: torch.dtype, handlers: dict[str, Handler]) -> Any:
        """Execute the model's forward function with `handlers` for some modules."""
        return self.decoder.run(ids_BT, dtype, handlers, training=self.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "WrappedLayer":
        """Move the layer, or change the dtype of its parameters and of those buffers that have it in transformers."""
        before = [(module, path, name, buffer) for path, module in self.named_modules()
                  for name, buffer in module._buffers.items()]
        super()._apply(fn, recurse)
        for module, path, name, buffer in before:
            after = module._buffers[name]
            if buffer is None or after is None or after.dtype == buffer.dtype:
                continue
            first, _, inner = path.partition(".")
            if ".".join(filter(None, (self._paths[first], inner, name))) not in self.decoder.cast_buffers:
                module._buffers[name] = buffer.to(after.device)
        return self


class Embedding(nn.Module):
    """The token embedding, whose matrix [V, D] is also the head's in a tied model.

    The module that computes it is not a submodule, so that the matrix is a parameter of this module itself: ZeRO-3
    gathers it when this module is called, for both of its uses.
    """

    embedding: torch.Tensor

    def __init__(self, decoder: Decoder, layer: Layer, loss: TrainingLoss | None = None) -> None:
        super().__init__()
        create_parameters(self, layer.by_name())
        self.decoder, self.loss = decoder, loss or TrainingLoss()
        module = decoder.copy(decoder.parts.embedding)
        replace_parameter(module, "weight", self._parameters["embedding"])  # type: ignore[arg-type]
        self._hidden_module = (module,)  # in a tuple, so that it does not become a submodule

    def forward(self, x: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Map int [B, T] to [B, T, D], and floating [B, T, D] to logits [B, T, V], or with labels to the loss."""
        if labels is not None:
            return self.loss(x, self.embedding, labels)
        if x.is_floating_point():
            return F.linear(x, self.embedding)
        (module,) = self._hidden_module
        move_buffers(module, x.device)

        def embed(ids_BT: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # code such as `ids.to(embedding.weight.device)` moves them to the skeleton's meta device
            raise Stop(module(x if ids_BT.is_meta else ids_BT, *args, **kwargs))
        embedded_BTD: torch.Tensor = self.decoder.run(x, self.embedding.dtype, {self.decoder.parts.embedding: embed},
                                                      training=self.training)
        if self.decoder.parts.carried:  # the prologue needs the ids
            return torch.cat([embedded_BTD, digits_of(x, embedded_BTD.dtype)], -1)
        return embedded_BTD


class Prologue(WrappedLayer):
    """The modules between the token embedding and the first decoder layer: learned positions, norms, scales."""

    def __init__(self, decoder: Decoder, layer: Layer) -> None:
        super().__init__(decoder, layer, {own_name(path): path for path in decoder.parts.prologue})

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        parts, ids_BT = self.decoder.parts, token_ids_like(x_BTD)
        recorders: dict[str, Handler] = {parts.blocks[0]: _stop_with_first}
        if parts.carried:
            x_BTD, ids_BT = x_BTD[..., :-DIGITS], ids_of(x_BTD[..., -DIGITS:])
            recorders = self._recorders()
        hidden_BTD: torch.Tensor = self.run(ids_BT, self.dtype or x_BTD.dtype, {
            parts.embedding: lambda *args, **kwargs: x_BTD, **recorders,
            **{path: self.get_submodule(own_name(path)) for path in parts.prologue}})
        return hidden_BTD

    def _recorders(self) -> dict[str, Handler]:
        """Return handlers for the decoder layers that collect the carried tensors; the last one packs them."""
        parts = self.decoder.parts
        first_uses = {min(each.uses): each for each in parts.carried}
        found: dict[Carried, torch.Tensor] = {}

        def recorder(index: int, path: str) -> Handler:
            module = self.decoder.model.get_submodule(path)

            def handler(*args: Any, **kwargs: Any) -> Any:
                hidden, named = bound_arguments(module, args, kwargs)
                found.update({first_uses[index, name]: value for name, value in named.items()
                              if (index, name) in first_uses})
                if len(found) == len(parts.carried):
                    raise Stop(pack(hidden, parts.carried, found))
                return parts.returned(hidden)
            return handler

        return {path: recorder(index, path) for index, path in enumerate(parts.blocks)}


class DecoderLayer(WrappedLayer):
    """A decoder layer of transformers, with the arguments that the model passes to it."""

    is_compiled = False
    layer: nn.Module

    def __init__(self, decoder: Decoder, layer: Layer, index: int, recompute: str = "none") -> None:
        super().__init__(decoder, layer, {"layer": decoder.parts.blocks[index]})
        self.index, self.recompute = index, recompute

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        parts = self.decoder.parts
        arguments = self.decoder.arguments(self.index, x_BTD, self.dtype or x_BTD.dtype)
        # new containers in each call: layers cannot pass values to later ones in them
        arguments = tree_map(lambda value: value, arguments)
        if not parts.carried:
            output = self.layer(x_BTD, **arguments)
            return output[0] if isinstance(output, (tuple, list)) else output
        hidden, carried, others = unpack(x_BTD, parts.hidden_shape, parts.carried, self.index)
        output = self.layer(hidden, **{**arguments, **carried})
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        return torch.cat([hidden.flatten(2), others], -1)


class Epilogue(WrappedLayer):
    """The modules between the last decoder layer and the head: the final norm."""

    def __init__(self, decoder: Decoder, layer: Layer) -> None:
        super().__init__(decoder, layer, {own_name(path): path for path in decoder.parts.epilogue})

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        parts = self.decoder.parts
        if parts.carried:
            x_BTD = x_BTD.unflatten(2, parts.hidden_shape)
        hidden_BTD: torch.Tensor = self.run(token_ids_like(x_BTD), self.dtype or x_BTD.dtype, {
            parts.blocks[-1]: lambda *args, **kwargs: parts.returned(x_BTD), parts.head: _stop_with_first,
            **{path: self.get_submodule(own_name(path)) for path in parts.epilogue}})
        return hidden_BTD


def _stop_with_first(*args: Any, **kwargs: Any) -> Any:
    raise Stop(args[0] if args else next(iter(kwargs.values())))


def final_logits(decoder: Decoder, logits_BTV: torch.Tensor) -> torch.Tensor:
    """Return the model's logits for what its head returned: scaled or soft-capped, as the forward function does."""
    logits_BTV = decoder.run(token_ids_like(logits_BTV), logits_BTV.dtype, {
        decoder.parts.head: lambda *args, **kwargs: logits_BTV})
    return logits_BTV


class LogitsHead(WrappedLayer):
    """Untied head of a model that scales or soft-caps its logits.

    `ends_in_loss`: without labels it returns the logits, and with labels the loss of given logits. Otherwise its input
    with labels are hidden states.
    """

    lm_head: nn.Module

    def __init__(self, decoder: Decoder, layer: Layer, loss: TrainingLoss | None = None, *,
                 ends_in_loss: bool = False) -> None:
        super().__init__(decoder, layer, {"lm_head": decoder.parts.head})
        self.loss, self.ends_in_loss = loss or TrainingLoss(), ends_in_loss

    def forward(self, x: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        if labels is not None and self.ends_in_loss:
            return self.loss.of_logits(x, labels)
        logits_BTV = final_logits(self.decoder, self.lm_head(x))
        return logits_BTV if labels is None else self.loss.of_logits(logits_BTV, labels)


def tied_logits_head(embedding: Embedding, x: torch.Tensor, labels: Labels | None = None, *,
                     ends_in_loss: bool = False) -> torch.Tensor:
    """Compute the tied head of a model that scales or soft-caps its logits; see LogitsHead."""
    if labels is not None and ends_in_loss:
        return embedding.loss.of_logits(x, labels)
    logits_BTV = final_logits(embedding.decoder, embedding(x))
    return logits_BTV if labels is None else embedding.loss.of_logits(logits_BTV, labels)


def wrapped_specs(config: ModelConfig, decoder: Decoder, *, ends_in_loss: bool, loss: TrainingLoss | None,
                  recompute: Recompute) -> list[LayerSpec]:
    """List the specs of the wrapped layers. The arguments are those of layer_specs.build_specs."""
    specs: list[LayerSpec] = []
    for layer in config.layers():
        if layer.kind == "block":
            index = len(specs) - 1 - decoder.parts.changes_embedding
            specs.append(LayerSpec(DecoderLayer, decoder, layer, index, recompute.part_of(index)))
        elif layer.kind == "norm":
            specs.append(LayerSpec({"EmbeddingNorm": Prologue, "FinalNorm": Epilogue}[layer.class_name], decoder,
                                   layer))
        elif layer.tied:
            of_head: Any = tied_loss_head if ends_in_loss else tied_head
            if not decoder.parts.plain_head:
                of_head = partial(tied_logits_head, ends_in_loss=ends_in_loss)
            specs.append(TiedLayerSpec("embed", Embedding, decoder, layer, loss, tied_weight_attr="embedding",
                                       forward_fn=of_head if layer.kind == "head" else None))
        elif layer.kind == "embedding":
            specs.append(LayerSpec(Embedding, decoder, layer, loss))
        elif decoder.parts.plain_head:
            specs.append(LayerSpec(LossHead if ends_in_loss else Head, config, layer, loss))
        else:
            specs.append(LayerSpec(LogitsHead, decoder, layer, loss, ends_in_loss=ends_in_loss))
    return specs
