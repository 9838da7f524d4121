"""The experts of a block: one parameter for each matrix has those of all experts.

Shapes: R rows in the order of their experts, E experts on this rank, C rows of each expert, D hidden size, F inner size
of an expert.
"""

import torch
from torch import nn

from pretrain.distributed.parallel_groups import ALONE, RankGroup
from pretrain.model.config import ModelConfig
from pretrain.model.kernels.activation import activated_linear, plain_activated_linear
from pretrain.model.kernels.linear import linear
from pretrain.model.layers.moe.grouped import activated_expert_linear, can_group, expert_linear, to_slots
from pretrain.model.parallel.parts import Part, set_part, split_range
from pretrain.model.parallel.token_exchange import (
    plan_equal_exchange,
    plan_exchange,
    return_from_experts,
    send_to_experts,
)


class Experts(nn.Module):
    """down(activation(gate(x)) * up(x)) with other matrices for each expert.

    Args:
        group: the ranks that share the experts; each has the complete matrices of some of them.
        plain_operators: use torch's operators instead of the custom kernels.
    """

    def __init__(self, config: ModelConfig, *, group: RankGroup = ALONE, plain_operators: bool = False) -> None:
        super().__init__()
        assert config.gated_mlp, "experts without a gate"
        assert not config.mlp_bias, "experts with biases"
        self.activation, self.plain_operators, self.group = config.activation, plain_operators, group
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate = _stacked(config.num_experts, inner, hidden, group)
        self.up = _stacked(config.num_experts, inner, hidden, group)
        self.down = _stacked(config.num_experts, hidden, inner, group)

    def forward(self, x_RD: torch.Tensor, rows_E: torch.Tensor, capacity: int = 0) -> torch.Tensor:
        """Return the outputs [R, D].

        Args:
            x_RD: this rank's rows for all experts, also for those of other ranks.
            rows_E: int64, on the device of x: rows of each expert.
            capacity: the number of rows of each expert if all have equally many; otherwise 0.
        """
        if self.group.size == 1:
            return self._compute(x_RD, rows_E, capacity)
        exchange = plan_equal_exchange(len(rows_E), capacity, self.group, x_RD.device) if capacity else \
            plan_exchange(rows_E, self.group)
        out_RD = self._compute(send_to_experts(x_RD, exchange), exchange.counts, capacity * self.group.size)
        return return_from_experts(out_RD, exchange)

    def _compute(self, x_RD: torch.Tensor, rows_E: torch.Tensor, capacity: int) -> torch.Tensor:
        """Return the outputs of this rank's experts."""
        if len(x_RD) == 0:  # not the input itself: the matrices need gradients on each rank that holds them
            return self._products(x_RD.view(len(rows_E), 0, x_RD.shape[1]), None).flatten(0, 1)
        if capacity:
            return self._products(x_RD.view(-1, capacity, x_RD.shape[1]), None).flatten(0, 1)
        if x_RD.device.type == "cpu":
            return self._one_by_one(x_RD, rows_E)
        if can_group(x_RD, self.up) and can_group(x_RD, self.down):
            return self._products(x_RD, rows_E.cumsum(0).to(torch.int32))
        x_ECD, slot_R = to_slots(x_RD, rows_E, int(rows_E.max()))  # waits for the device
        return self._products(x_ECD, None).flatten(0, 1).index_select(0, slot_R)

    def _products(self, x: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs for the rows [R, D] with their ends, or for [E, C, D], by one operator for all experts."""
        gate, up = expert_linear(x, self.gate, ends_E), expert_linear(x, self.up, ends_E)
        return activated_expert_linear(self.activation, up, gate, self.down, ends_E)

    def _one_by_one(self, x_RD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
        """Compute each expert with the kernels of the MLP. Only on CPUs, where a loop costs little."""
        down = plain_activated_linear if self.plain_operators else activated_linear
        widen = nn.functional.linear if self.plain_operators else linear
        # unbind, because the gradients of indexed matrices would each have the size of the complete parameter
        experts = zip(x_RD.split(rows_E.tolist()), self.gate.unbind(0), self.up.unbind(0), self.down.unbind(0),
                      strict=True)
        return torch.cat([down(self.activation, widen(x_D, up, None), widen(x_D, gate, None), weight, None)
                          for x_D, gate, up, weight in experts if len(x_D)])


def _stacked(experts: int, rows: int, columns: int, group: RankGroup) -> nn.Parameter:
    """Return the uninitialized matrices of this rank's experts, [E, rows, columns]."""
    part = Part((experts, rows, columns), 0, (split_range(experts, group),))
    parameter = nn.Parameter(torch.empty(part.local_shape))
    if group.size > 1:
        set_part(parameter, part)
    return parameter
