"""Layers of the model: tensors in, tensors out, independent of pipelines and ZeRO.

Shapes: B batch, T positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn
from torch.utils.checkpoint import checkpoint

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.attention import Attention
from pretrain.model.config import ModelConfig
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.fused_loss import carry
from pretrain.model.linear import Linear
from pretrain.model.loss import Labels, TrainingLoss
from pretrain.model.mlp import build_mlp
from pretrain.model.norm import Norm
from pretrain.model.rope import Rope


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Limit the logits to (-cap, cap): cap * tanh(logits / cap); a cap of 0 means no limit."""
    return torch.tanh(logits / cap) * cap if cap else logits


class OutputLinear(Linear):
    """Output matrix [V, D] of a model without tied embeddings."""

    def __init__(self, config: ModelConfig, loss: TrainingLoss | None = None) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.softcap, self.loss = config.logit_softcap, loss or TrainingLoss()

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Return the logits [B, T, V], or with labels the loss."""
        if labels is not None:
            return self.loss(x_BTD, self.weight, labels, bias=self.bias, softcap=self.softcap)
        return soft_cap(F.linear(x_BTD, self.weight, self.bias), self.softcap)


class TokenEmbedding(nn.Module):
    """One matrix [V, D] that maps tokens to hidden states and, if tied, hidden states to logits or loss.

    All uses go through `forward`, because ZeRO-3 gathers a partitioned weight when its module is called.
    """

    def __init__(self, config: ModelConfig, loss: TrainingLoss | None = None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.scale, self.softcap, self.loss = config.embedding_scale, config.logit_softcap, loss or TrainingLoss()
        # with learned positions, PositionEmbedding applies the dropout
        self.dropout = nn.Dropout(config.embedding_dropout if config.position != "learned" else 0.0)

    def forward(self, x: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Map int [B, T] to [B, T, D], and floating [B, T, D] to logits [B, T, V], or with labels to the loss."""
        if labels is not None:
            return self.loss(x, self.embedding, labels, softcap=self.softcap)
        if x.is_floating_point():
            return soft_cap(F.linear(x, self.embedding), self.softcap)
        embedded_BTD = F.embedding(x, self.embedding)
        if self.scale != 1.0:  # rounded to the weight's dtype, as in transformers
            embedded_BTD = embedded_BTD * torch.tensor(self.scale, dtype=self.embedding.dtype, device="cpu")
        return self.dropout(embedded_BTD)


class PositionEmbedding(nn.Module):
    """Add learned positions, then apply the dropout of the embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.max_positions, config.hidden_size))
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        if documents is None:
            return self.dropout(x_BTD + self.embedding[: x_BTD.shape[1]])
        return self.dropout(x_BTD + F.embedding(documents.positions_BT, self.embedding))


class Block(nn.Module):
    """Attention and MLP with residual connections: one after the other, or both from the same input.

    Args:
        rope: shared by all blocks with the same frequencies; None without rotary positions.
        index: of the block in the model, from 0.
        plain_operators: use torch's operators instead of the custom kernels.
        recompute: the part that is recomputed in the backward pass, one of recompute.PARTS; run_layers.py recomputes
            "blocks".
        groups: the ranks that share matrices, sequences and experts.
    """

    def __init__(self, config: ModelConfig, rope: Rope | None, *, index: int = 0, plain_operators: bool = False,
                 recompute: str = "none", groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.is_compiled = False  # layer_specs.compile_blocks sets it
        self.recompute = recompute
        self.parallel, self.shared_norm = config.parallel_residual, config.shared_norm
        build_norm = partial(Norm, config, plain_operators=plain_operators)
        self.norm1 = build_norm() if config.pre_norm else None
        self.attention = Attention(config, rope, window=config.window(index), plain_operators=plain_operators,
                                   groups=groups)
        self.post_norm1 = build_norm() if config.post_norm else None
        self.norm2 = build_norm() if config.pre_norm and not config.shared_norm else None
        self.mlp = build_mlp(config, index, plain_operators=plain_operators, groups=groups)
        self.post_norm2 = build_norm() if config.post_norm else None
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        if self.shared_norm:
            normed_BTD = _apply(self.norm1, x_BTD)
            attended_BTD = self.dropout(self._part("attention", self._attend, normed_BTD, documents))
            return x_BTD + attended_BTD + self.dropout(self._part("mlp", self._transform, normed_BTD))
        if self.norm1 is not None and self.norm2 is not None and not self.parallel:
            return self._forward_with_fused_sums(x_BTD, documents)
        after_BTD = x_BTD + self.dropout(self._part("attention", self._attend, x_BTD, documents))
        mlp_input_BTD = x_BTD if self.parallel else after_BTD
        return after_BTD + self.dropout(self._part("mlp", self._transform, mlp_input_BTD))

    def _forward_with_fused_sums(self, x_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Compute attention, then the MLP. The norms also add the residual connections and their gradients."""
        x_BTD, attended_BTD = self._part("attention", self._attend_and_add, x_BTD, documents)
        inputs = (x_BTD, self.dropout(attended_BTD))
        if self.recompute == "mlp":  # the recomputed part keeps one input
            inputs = (x_BTD + inputs[1], None)
        x_BTD, transformed_BTD = self._part("mlp", self._transform_and_add, *inputs)
        return x_BTD + self.dropout(transformed_BTD)

    def _attend_and_add(self, x_BTD: torch.Tensor,
                        documents: Documents | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.norm1 is not None
        x_BTD, normed_BTD = self.norm1(x_BTD, returns_sum=True)
        return x_BTD, _apply(self.post_norm1, self.attention(normed_BTD, documents=documents))

    def _transform_and_add(self, x_BTD: torch.Tensor,
                           added_BTD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.norm2 is not None
        x_BTD, normed_BTD = self.norm2(x_BTD, added_BTD, returns_sum=True)
        return x_BTD, _apply(self.post_norm2, self.mlp(normed_BTD))

    def _attend(self, x_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        normed_BTD = x_BTD if self.shared_norm else _apply(self.norm1, x_BTD)
        return _apply(self.post_norm1, self.attention(normed_BTD, documents=documents))

    def _transform(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed_BTD = x_BTD if self.shared_norm else _apply(self.norm2, x_BTD)
        return _apply(self.post_norm2, self.mlp(normed_BTD))

    def _part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Compute a part of the block. Without its residual dropout, whose mask is kept, the part ends earlier."""
        if self.recompute != name or not torch.is_grad_enabled():
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False)


def _apply(layer: nn.Module | None, x_BTD: torch.Tensor) -> torch.Tensor:
    return x_BTD if layer is None else layer(x_BTD)


class Head(nn.Module):
    """Head of a model without tied embeddings: logits [B, T, V], or with labels the loss."""

    def __init__(self, config: ModelConfig, loss: TrainingLoss | None = None) -> None:
        super().__init__()
        self.lm_head = OutputLinear(config, loss)

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        output: torch.Tensor = self.lm_head(x_BTD, labels)
        return output


class LossHead(Head):
    """Last layer of a pipeline. Without labels it returns its input; the loss function calls it again with labels."""

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        if labels is None:
            return carry(x_BTD, self.lm_head.weight, self.lm_head.bias)
        return super().forward(x_BTD, labels)
