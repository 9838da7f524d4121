"""The transformer block and its MLP: tensors in, tensors out, independent of pipelines and ZeRO.

Shapes: B batch, T positions, D hidden size, F inner size of the MLP, n positions of a tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import Layer, ModelConfig, Parameters, inside
from pretrain.model.kernels.activation import activated_linear, plain_activated_linear
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.norm import Normed, with_source
from pretrain.model.layers.attention import Attention
from pretrain.model.layers.linear import ColumnLinear, RowLinear, column_products
from pretrain.model.layers.moe import MoE
from pretrain.model.layers.norm import Norm
from pretrain.model.layers.rope import Rope
from pretrain.model.parallel.shared_tensors import summed_gradients


class ActivatedLinear(RowLinear):
    """Activation function followed by a linear layer."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, plain_operators: bool,
                 groups: ParallelGroups) -> None:
        super().__init__(parameters, plain_operators=plain_operators, groups=groups)
        self.activation = config.activation

    def _product(self, *inputs: Any, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return [B, T, D] for `up`, or for `up` and `gate`, each [B, T, F]."""
        up_BTF, gate_BTF = inputs if len(inputs) == 2 else (*inputs, None)
        if self.plain_operators:
            return plain_activated_linear(self.activation, up_BTF, gate_BTF, self.weight, bias_O)
        return activated_linear(self.activation, up_BTF, gate_BTF, self.weight, bias_O, self.products)


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)).

    Args:
        parameters: the described parameters of `gate`, `up` and `down`.
        groups: the ranks that share matrices. With more than one rank, inputs and outputs are shards of the sequences.
        recomputed: the backward pass recomputes the MLP.
        tiles: number of pieces of the sequences that are computed and recomputed one after the other.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS, recomputed: bool = False, tiles: int = 1) -> None:
        super().__init__()
        self.group, self.tiles = groups.tensor, tiles
        widen = partial(ColumnLinear, plain_operators=plain_operators, groups=groups,
                        recomputed=recomputed or tiles > 1)
        self.gate = widen(inside(parameters, "gate")) if config.gated_mlp else None
        self.up = widen(inside(parameters, "up"))
        self.down = ActivatedLinear(config, inside(parameters, "down"), plain_operators=plain_operators, groups=groups)

    def forward(self, x_BTD: torch.Tensor | Normed) -> torch.Tensor:
        if isinstance(x_BTD, Normed):  # not in tiles
            return self._compute(x_BTD)
        return in_tiles(self._compute, x_BTD, self.tiles)

    def _compute(self, x_BTD: torch.Tensor | Normed) -> torch.Tensor:
        if self.group.size > 1:
            assert isinstance(x_BTD, torch.Tensor)
            return self.narrow(*column_products(x_BTD, self.wide_layers()))
        gate_BTF = None if self.gate is None else self.gate(x_BTD)
        return self.narrow(self.up(x_BTD), gate_BTF)

    def wide_layers(self) -> list[ColumnLinear]:
        """Return the layers that get the input of the MLP."""
        return [self.up] if self.gate is None else [self.up, self.gate]

    def narrow(self, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output of the MLP from the outputs of `wide_layers`."""
        output: torch.Tensor = self.down(up_BTF, gate_BTF)
        return output


def build_mlp(config: ModelConfig, layer: Layer, *, index: int = 0, plain_operators: bool,
              groups: ParallelGroups = NO_GROUPS, recomputed: bool = False, tiles: int = 1) -> nn.Module:
    """Return the MLP or the experts of a block, which maps [B, T, D] to [B, T, D]."""
    parameters = inside(layer.by_name(), "mlp")
    build = partial(MLP, config, plain_operators=plain_operators, groups=groups, recomputed=recomputed, tiles=tiles)
    if not layer.has_experts:
        return build(parameters)
    of_shared_expert = inside(parameters, "shared_expert")
    return MoE(config, parameters, index=index, shared_expert=build(of_shared_expert) if of_shared_expert else None,
               plain_operators=plain_operators, groups=groups)


def in_tiles(layer: Callable[[torch.Tensor], torch.Tensor], x_BTD: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return layer(x), computed in at most `tiles` pieces of B * T positions. The layer maps each position by itself.

    The backward pass recomputes each tile, so that the inner tensors of only one tile exist at a time. For an MLP on
    very long sequences, they would take more memory than all the rest (ALST: Bekman et al., arXiv 2506.13996).

    DeepSpeed 0.19.8's TiledMLP (runtime/sequence_parallel/ulysses_sp.py) is not used. It runs autograd inside of its
    backward function, so that hooks on a weight's gradient, such as --noise_scale_interval's, see a gradient for
    each tile instead of their sum. Here autograd itself sums the gradients of the tiles.

    The layer must not draw random numbers: their state is not restored.
    """
    if tiles == 1:
        return layer(x_BTD)
    outputs = [_tile(layer, x_1nD) for x_1nD in x_BTD.reshape(1, -1, x_BTD.shape[-1]).chunk(tiles, dim=1)]
    return torch.cat(outputs, dim=1).view(x_BTD.shape)


def _tile(layer: Callable[[torch.Tensor], torch.Tensor], x_1nD: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return layer(x_1nD)
    output_1nD: torch.Tensor = checkpoint(layer, x_1nD, use_reentrant=False, preserve_rng_state=False)
    return output_1nD


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
