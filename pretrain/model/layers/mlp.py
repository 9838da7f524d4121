"""MLP of a block.

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
from pretrain.model.kernels.norm import Normed
from pretrain.model.layers.linear import ColumnLinear, RowLinear, column_products
from pretrain.model.layers.moe import MoE


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
