"""Causal self-attention with its projections.

Shapes: B batch, T positions, D hidden size, H query heads, K key/value heads, G = H + 2 K, E elements per head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import ModelConfig, Parameters, inside, local_kv_heads
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.norm import Normed
from pretrain.model.kernels.torch_attention import (
    ATTENTION,
    PLAIN_ATTENTION,
    AttentionSettings,
    alibi_slopes,
    make_mask,
)
from pretrain.model.layers.linear import ColumnLinear, RowLinear
from pretrain.model.layers.norm import Norm, SplitNorm
from pretrain.model.layers.rope import Rope
from pretrain.model.parallel.sequence_shards import heads_for_positions, positions_for_heads


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are all query heads, then all key heads, then all value heads.

    Args:
        parameters: the described parameters of the attention.
        window: number of latest tokens that a query sees, with its own; 0: all tokens.
        groups: the ranks that share heads. With more than one rank, inputs and outputs are shards of the sequences.
        recomputed: the backward pass recomputes the layer.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, rope: Rope | None, *, window: int = 0,
                 plain_operators: bool = False, groups: ParallelGroups = NO_GROUPS, recomputed: bool = False) -> None:
        super().__init__()
        tensor, self.sequence = groups.tensor, groups.sequence  # at most one of them has more than one rank
        self.num_heads, self.num_kv_heads = config.num_heads // tensor.size, config.num_kv_heads // tensor.size
        self.head_size = config.head_size
        # under sequence parallelism, attention itself computes some of the heads at all positions
        own_heads = self.num_heads // self.sequence.size
        own_kv_heads = local_kv_heads(self.num_heads, self.num_kv_heads, self.sequence.size)
        self.dropout, self.plain_operators = config.attention_dropout, plain_operators
        self.rope, self.window = rope, window
        # not a buffer, because the engine casts buffers to bf16
        shares_heads = tensor if tensor.size > 1 else self.sequence
        self.slopes_H = alibi_slopes(config.num_heads, shares_heads.rank, shares_heads.size) \
            if config.position == "alibi" else None
        self.settings = AttentionSettings(own_heads, own_kv_heads, config.attention_scale, window,
                                          config.attention_softcap, self.slopes_H)
        self.qkv = ColumnLinear(inside(parameters, "qkv"), plain_operators=plain_operators, groups=groups,
                                recomputed=recomputed)
        self.qk_norm = config.qk_norm
        is_split = config.qk_norm == "all" and tensor.size > 1
        build_norm: Callable[[Parameters], Norm] = partial(SplitNorm, config, groups=groups) if is_split else \
            partial(Norm, config, plain_operators=plain_operators, groups=groups)
        self.q_norm = build_norm(inside(parameters, "q_norm")) if config.qk_norm else None
        self.k_norm = build_norm(inside(parameters, "k_norm")) if config.qk_norm else None
        self.out = RowLinear(inside(parameters, "out"), plain_operators=plain_operators, groups=groups)

    def forward(self, x_BTD: torch.Tensor | Normed, documents: Documents | None = None) -> torch.Tensor:
        return self.attend(self.qkv(x_BTD), documents)

    def attend(self, qkv_BTC: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Return the output of the layer from the output [B, T, G * E] of `qkv`."""
        out: torch.Tensor = self.out(self._attend(qkv_BTC.unflatten(2, (-1, self.head_size)), documents).flatten(2))
        return out

    def _attend(self, qkv_BTGE: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Return [B, T, H, E] from queries, keys and values: G = H + 2 K heads."""
        inputs: tuple[torch.Tensor, ...] = (qkv_BTGE,)  # one: the gradients of its parts need no concatenation
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE, v_BTKE = qkv_BTGE.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
            inputs = self._normalized(self.q_norm, q_BTHE), self._normalized(self.k_norm, k_BTKE), v_BTKE
        if self.sequence.size == 1:
            return self._attend_to_all_positions(inputs, documents)
        inputs = (heads_for_positions(inputs, self.num_heads, self.sequence),)
        return positions_for_heads(self._attend_to_all_positions(inputs, documents), self.sequence)

    def _attend_to_all_positions(self, inputs: tuple[torch.Tensor, ...], documents: Documents | None) -> torch.Tensor:
        """Return [B, T, H, E] of this rank's heads. The inputs are (qkv,) or (q, k, v), with complete sequences."""
        arguments = inputs, self.settings, self.rope, documents, self.dropout if self.training else 0.0
        kernel = PLAIN_ATTENTION if self.plain_operators else ATTENTION.choose(*arguments)
        return kernel(*arguments)

    def prepare(self, documents: Documents, like: torch.Tensor) -> None:
        """Make the tables and the mask of a micro-batch in the dtype of `like`, before a compiled block uses them."""
        if self.rope is not None:
            self.rope.document_tables(documents, like)
        q_0HTE = like.new_empty(0, self.settings.num_heads, documents.positions_BT.shape[1], self.head_size)
        make_mask(q_0HTE, self.window, self.slopes_H, documents, dropout=self.dropout if self.training else 0.0,
                  plain=self.plain_operators)

    def _normalized(self, norm: nn.Module, x_BTHE: torch.Tensor) -> torch.Tensor:
        """Apply a norm over each head, or over all heads together."""
        normed: torch.Tensor = norm(x_BTHE if self.qk_norm == "head" else x_BTHE.flatten(2))
        return normed.view(x_BTHE.shape)
