"""MLP of a block.

Shapes: B batch, T positions, D hidden size, F inner size of the MLP.
"""

from functools import partial

import torch
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.config import ModelConfig
from pretrain.model.kernels.activation import activated_linear, plain_activated_linear
from pretrain.model.linear import Linear


class ActivatedLinear(Linear):
    """Activation function followed by a linear layer."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool) -> None:
        super().__init__(config.intermediate_size, config.hidden_size, bias=config.mlp_bias,
                         plain_operators=plain_operators)
        self.activation = config.activation

    def forward(self, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None = None) -> torch.Tensor:
        operator = plain_activated_linear if self.plain_operators else activated_linear
        return operator(self.activation, up_BTF, gate_BTF, self.weight, self.bias)


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        widen = partial(Linear, config.hidden_size, config.intermediate_size, bias=config.mlp_bias,
                        plain_operators=plain_operators)
        self.gate = widen() if config.gated_mlp else None
        self.up = widen()
        self.down = ActivatedLinear(config, plain_operators=plain_operators)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate_BTF = None if self.gate is None else self.gate(x_BTD)
        output: torch.Tensor = self.down(self.up(x_BTD), gate_BTF)
        return output


def build_mlp(config: ModelConfig, index: int, *, plain_operators: bool,
              groups: ParallelGroups = NO_GROUPS) -> nn.Module:
    """Return the MLP of block `index`, which maps [B, T, D] to [B, T, D]."""
    del index  # all blocks of the present families have the same MLP
    return MLP(config, plain_operators=plain_operators, groups=groups)
