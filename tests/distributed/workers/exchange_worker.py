"""One rank of test_token_exchange.py: send rows to experts on other ranks and back, with gradients."""

from typing import Any

import torch
import torch.distributed as dist

from pretrain.distributed.collectives import gather
from pretrain.distributed.parallel_groups import create_group
from pretrain.model.layers.experts import plan_exchange, return_from_experts, send_to_experts
from tests.support.cases_loop import each_case


def exchanged(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Multiply each row by its expert's weights on the expert's rank. Returns the values and gradients of all ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = create_group([list(range(ranks))])
    counts_E = torch.tensor(case["counts"][rank])
    numbers = torch.Generator().manual_seed(rank)
    rows_ND = torch.randn(int(counts_E.sum()), 3, generator=numbers).to(getattr(torch, case["dtype"]))
    rows_ND.requires_grad_()
    exchange = plan_exchange(counts_E, group)
    local = len(counts_E) // ranks
    weights_LD = torch.stack([_weights(rank * local + index) for index in range(local)]).requires_grad_()
    received_MD = send_to_experts(rows_ND, exchange)
    expert_M = torch.arange(local).repeat_interleave(exchange.counts)
    returned_ND = return_from_experts(received_MD * weights_LD[expert_M].to(received_MD.dtype), exchange)
    factors_ND = torch.randn(returned_ND.shape, generator=numbers).to(returned_ND.dtype)
    (returned_ND * factors_ND).sum().backward()
    expected_ND = torch.arange(len(counts_E)).repeat_interleave(counts_E)
    own_weights_ND = torch.stack([_weights(int(expert)) for expert in expected_ND]) if len(expected_ND) \
        else torch.empty(0, 3)
    assert weights_LD.grad is not None
    assert rows_ND.grad is not None
    return gather({
        "received": exchange.counts.tolist(),
        "rows": torch.equal(returned_ND, rows_ND.detach() * own_weights_ND.to(rows_ND.dtype)),
        "row_gradients": torch.equal(rows_ND.grad, factors_ND * own_weights_ND.to(rows_ND.dtype)),
        "weight_gradients": weights_LD.grad.tolist(),
        "own": [(rows_ND.detach() * factors_ND)[expected_ND == expert].float().sum(0).tolist()
                for expert in range(len(counts_E))]})


def _weights(expert: int) -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 4.0]) * 2.0**expert


if __name__ == "__main__":
    each_case(exchanged)
