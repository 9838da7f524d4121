"""MLP of a block.

Shapes: B batch, T positions, D hidden size, F inner size of the MLP.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from pretrain.distributed.parallel_groups import ALONE, NO_GROUPS, ParallelGroups, RankGroup
from pretrain.model.config import ModelConfig
from pretrain.model.kernels.activation import activated_linear, plain_activated_linear
from pretrain.model.layers.moe.layer import MoE
from pretrain.model.layers.tensor_parallel import ColumnLinear, RowLinear, column_products
from pretrain.model.layers.tiles import in_tiles


class ActivatedLinear(RowLinear):
    """Activation function followed by a linear layer."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool, group: RankGroup = ALONE) -> None:
        super().__init__(config.intermediate_size, config.hidden_size, bias=config.mlp_bias,
                         plain_operators=plain_operators, group=group)
        self.activation = config.activation

    def _product(self, *inputs: torch.Tensor | None, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return [B, T, D] for `up`, or for `up` and `gate`, each [B, T, F]."""
        up_BTF, gate_BTF = inputs if len(inputs) == 2 else (*inputs, None)
        assert up_BTF is not None
        operator = plain_activated_linear if self.plain_operators else activated_linear
        return operator(self.activation, up_BTF, gate_BTF, self.weight, bias_O)


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)).

    Args:
        groups: the ranks that share matrices. With more than one rank, inputs and outputs are shards of the sequences.
        recomputed: the backward pass recomputes the MLP.
        tiles: number of pieces of the sequences that are computed and recomputed one after the other.
    """

    def __init__(self, config: ModelConfig, *, plain_operators: bool = False, groups: ParallelGroups = NO_GROUPS,
                 recomputed: bool = False, tiles: int = 1) -> None:
        super().__init__()
        self.group, self.tiles = groups.tensor, tiles
        widen = partial(ColumnLinear, config.hidden_size, [config.intermediate_size], bias=config.mlp_bias,
                        plain_operators=plain_operators, group=groups.tensor, recomputed=recomputed or tiles > 1)
        self.gate = widen() if config.gated_mlp else None
        self.up = widen()
        self.down = ActivatedLinear(config, plain_operators=plain_operators, group=groups.tensor)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return in_tiles(self._compute, x_BTD, self.tiles)

    def _compute(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.group.size > 1:
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


def build_mlp(config: ModelConfig, index: int, *, plain_operators: bool,
              groups: ParallelGroups = NO_GROUPS, recomputed: bool = False, tiles: int = 1) -> nn.Module:
    """Return the MLP or the experts of block `index`, which maps [B, T, D] to [B, T, D]."""
    build = partial(MLP, plain_operators=plain_operators, groups=groups, recomputed=recomputed, tiles=tiles)
    if not config.has_experts(index):
        return build(config)
    shared_expert = build(replace(config, intermediate_size=config.shared_expert_size)) \
        if config.shared_expert_size else None
    return MoE(config, index, shared_expert=shared_expert, plain_operators=plain_operators, groups=groups)
