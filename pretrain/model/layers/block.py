"""The transformer block: tensors in, tensors out, independent of pipelines and ZeRO.

Shapes: B batch, T positions, D hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import Layer, ModelConfig, inside
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.norm import Normed, with_source
from pretrain.model.layers.attention import Attention
from pretrain.model.layers.linear import column_products
from pretrain.model.layers.mlp import MLP, build_mlp
from pretrain.model.layers.norm import Norm
from pretrain.model.layers.rope import Rope
from pretrain.model.parallel.shared_tensors import summed_gradients


class Block(nn.Module):
    """Attention and MLP with residual connections: one after the other, or both from the same input.

    Args:
        layer: the description of the block. The block has the norms whose parameters are in it.
        rope: shared by all blocks with the same frequencies; None without rotary positions.
        index: of the block in the model, from 0.
        plain_operators: use torch's operators instead of the custom kernels.
        recompute: the part that is recomputed in the backward pass, one of recompute.PARTS; run_layers.py recomputes
            "blocks".
        mlp_tiles: number of pieces of the sequences in which the MLP is computed.
        groups: the ranks that share matrices, sequences and experts.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rope: Rope | None, *, index: int = 0,
                 plain_operators: bool = False, recompute: str = "none", mlp_tiles: int = 1,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.index = index
        self.is_compiled = False  # layer_specs.compile_blocks sets it
        self.recompute = recompute
        self.parallel, self.shared_norm = config.parallel_residual, config.shared_norm
        parameters = layer.by_name()

        def norm(name: str, *, recomputed: bool = False) -> Norm | None:
            described = inside(parameters, name)
            return Norm(config, described, plain_operators=plain_operators, groups=groups,
                        recomputed=recomputed) if described else None

        # otherwise a recomputed part or tile keeps the output of a norm that attention and MLP share; a router saves it
        inputs_are_kept = recompute in ("none", "blocks") and mlp_tiles == 1
        self.norm1 = norm("norm1", recomputed=inputs_are_kept and not layer.has_experts if config.shared_norm else True)
        self.attention = Attention(config, inside(parameters, "attention"), rope, window=layer.window,
                                   plain_operators=plain_operators, groups=groups,
                                   recomputed=recompute in ("attention", "blocks"))
        self.post_norm1 = norm("post_norm1")
        self.norm2 = norm("norm2", recomputed=not layer.has_experts and mlp_tiles == 1)
        self.mlp = build_mlp(config, layer, index=index, plain_operators=plain_operators, groups=groups,
                             recomputed=recompute in ("mlp", "blocks"), tiles=mlp_tiles)
        # the norm's output is then gathered once for attention and MLP
        self.shares_gather = config.shared_norm and groups.tensor.size > 1 and inputs_are_kept
        self.post_norm2 = norm("post_norm2")
        self.dropout = nn.Dropout(config.residual_dropout)
        self.tensor = groups.tensor

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        with summed_gradients(self, self.tensor):
            return self.compute(x_BTD, documents)

    def compute(self, x_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Return the output of the block. layer_specs.compile_blocks compiles this function."""
        if self.shared_norm:
            normed = _apply(self.norm1, x_BTD)
            if self.shares_gather:
                return self._add_to(x_BTD, normed, documents)
            attended_BTD = self.dropout(self._part("attention", self._attend, normed, documents))
            return x_BTD + attended_BTD + self.dropout(self._part("mlp", self._transform, normed))
        if self.norm1 is not None and self.norm2 is not None and not self.parallel:
            return self._forward_with_fused_sums(x_BTD, documents)
        after_BTD = x_BTD + self.dropout(self._part("attention", self._attend, x_BTD, documents))
        mlp_input_BTD = x_BTD if self.parallel else after_BTD
        return after_BTD + self.dropout(self._part("mlp", self._transform, mlp_input_BTD))

    def _add_to(self, x_BTD: torch.Tensor, normed_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Add attention and MLP of the same normed shard of the sequences, which is gathered once, to x."""
        assert isinstance(self.mlp, MLP)
        qkv_BTC, *wide = column_products(normed_BTD, [self.attention.qkv, *self.mlp.wide_layers()])
        attended_BTD = self.dropout(_apply(self.post_norm1, self.attention.attend(qkv_BTC, documents)))
        return x_BTD + attended_BTD + self.dropout(_apply(self.post_norm2, self.mlp.narrow(*wide)))

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
        x_BTD, *normed = self.norm1(x_BTD, returns_sum=True)
        return x_BTD, _apply(self.post_norm1, self.attention(with_source(*normed), documents=documents))

    def _transform_and_add(self, x_BTD: torch.Tensor,
                           added_BTD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.norm2 is not None
        x_BTD, *normed = self.norm2(x_BTD, added_BTD, returns_sum=True)
        return x_BTD, _apply(self.post_norm2, self.mlp(with_source(*normed)))

    def _attend(self, x: torch.Tensor | Normed, documents: Documents | None) -> torch.Tensor:
        normed = x if self.shared_norm else _apply(self.norm1, x)
        return _apply(self.post_norm1, self.attention(normed, documents=documents))

    def _transform(self, x: torch.Tensor | Normed) -> torch.Tensor:
        normed = x if self.shared_norm else _apply(self.norm2, x)
        return _apply(self.post_norm2, self.mlp(normed))

    def _part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Compute a part of the block. Without its residual dropout, whose mask is kept, the part ends earlier."""
        if self.recompute != name or not torch.is_grad_enabled():
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False)


def _apply(layer: nn.Module | None, x: Any) -> Any:
    """Return the output of a norm that the block may lack: a tensor, or a `Normed`."""
    return x if layer is None else layer(x)
