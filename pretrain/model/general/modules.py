"""Layers of a pipeline or plain module that compute with transformers' own modules (decoder.py).

Each layer takes one tensor: token ids or hidden states. What the model's forward function does between the modules is
executed by that function itself, with the modules of this layer in their places.

Shapes: B batch, T positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.model.description import Layer
from pretrain.model.general.decoder import Decoder, replace_parameter, token_ids_like
from pretrain.model.general.described_layers import own_name, persistent_buffers
from pretrain.model.general.skeleton import Handler, Stop, move_buffers
from pretrain.model.layers.vocabulary import Labels, TrainingLoss
from pretrain.model.parameters import create_parameters


class _Created(nn.Module):
    """Holds new parameters of a layer. zero.Init partitions them when the constructor ends."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        create_parameters(self, {str(index): each for index, each in enumerate(layer.parameters)})


class GeneralLayer(nn.Module):
    """Copies of transformers' modules as submodules, with new parameters. Their buffers keep their dtypes."""

    def __init__(self, decoder: Decoder, layer: Layer, paths: dict[str, str]) -> None:
        """`paths`: of the modules in transformers' model, by their names in this layer."""
        super().__init__()
        self.decoder = decoder
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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "GeneralLayer":
        """Move the layer, or change the dtype of its parameters. A change of dtype does not affect buffers.

        transformers keeps rotary frequencies and the biases of routers in fp32 in 16-bit models.
        """
        before = [(module, name, buffer) for module in self.modules() for name, buffer in module._buffers.items()]
        super()._apply(fn, recurse)
        for module, name, buffer in before:
            after = module._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
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

        def embed(*args: Any, **kwargs: Any) -> Any:
            raise Stop(module(*args, **kwargs))
        embedded_BTD: torch.Tensor = self.decoder.run(x, self.embedding.dtype, {self.decoder.parts.embedding: embed},
                                                      training=self.training)
        return embedded_BTD


class Prologue(GeneralLayer):
    """What lies between the token embedding and the first decoder layer: learned positions, norms, scales."""

    def __init__(self, decoder: Decoder, layer: Layer) -> None:
        super().__init__(decoder, layer, {own_name(path): path for path in decoder.parts.prologue})

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        parts = self.decoder.parts
        hidden_BTD: torch.Tensor = self.run(token_ids_like(x_BTD), x_BTD.dtype, {
            parts.embedding: lambda *args, **kwargs: x_BTD, parts.blocks[0]: _stop_with_first,
            **{path: self.get_submodule(own_name(path)) for path in parts.prologue}})
        return hidden_BTD


class DecoderLayer(GeneralLayer):
    """A decoder layer of transformers, with the arguments that the model passes to it."""

    is_compiled = False
    layer: nn.Module

    def __init__(self, decoder: Decoder, layer: Layer, index: int, recompute: str = "none") -> None:
        super().__init__(decoder, layer, {"layer": decoder.parts.blocks[index]})
        self.index, self.recompute = index, recompute

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        arguments = self.decoder.arguments(self.index, x_BTD, self.dtype or x_BTD.dtype)
        output = self.layer(x_BTD, **arguments)
        hidden_BTD: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
        return hidden_BTD


class Epilogue(GeneralLayer):
    """What lies between the last decoder layer and the head: the final norm."""

    def __init__(self, decoder: Decoder, layer: Layer) -> None:
        super().__init__(decoder, layer, {own_name(path): path for path in decoder.parts.epilogue})

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        parts = self.decoder.parts
        hidden_BTD: torch.Tensor = self.run(token_ids_like(x_BTD), x_BTD.dtype, {
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


class LogitsHead(GeneralLayer):
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
