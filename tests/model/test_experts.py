"""Experts: every way to compute them equals a plain loop, forward and backward; dropping of tokens; routers' losses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.description import inside
from pretrain.model.layers import experts as experts_module
from pretrain.model.layers.experts import Experts, to_slots
from pretrain.model.layers.moe import MoE, expert_capacity, plan_dispatch, route, train_routers
from tests.support.model_shapes import SHAPES

ROWS = torch.tensor([3, 0, 7, 1, 0, 5])  # of each expert
WAYS = ("one_by_one", "plain", "grouped", "slots")


def small(**changes: object) -> ModelConfig:
    return replace(model_config_from(SHAPES["qwen3_moe"], "test"), num_layers=1, **changes)


def experts_of(config: ModelConfig, **settings: Any) -> Experts:
    return Experts(config, inside(config.blocks()[0].by_name(), "mlp.experts"), **settings)


def moe_of(config: ModelConfig) -> MoE:
    return MoE(config, inside(config.blocks()[0].by_name(), "mlp"))


def filled(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    return module.to(dtype)


def compute(experts: Experts, x_RD: torch.Tensor, way: str) -> torch.Tensor:
    if way == "grouped":
        return experts._products(x_RD, ROWS.cumsum(0).to(torch.int32))
    if way == "slots":
        x_ECD, slot_R = to_slots(x_RD, ROWS, 8)
        return experts._products(x_ECD, None).flatten(0, 1)[slot_R]
    return experts(x_RD, ROWS)


def reference(experts: Experts, x_RD: torch.Tensor, rows_E: torch.Tensor = ROWS) -> torch.Tensor:
    parts = zip(x_RD.split(rows_E.tolist()), experts.gate, experts.up, experts.down, strict=True)
    return torch.cat([linear(silu(linear(x, gate)) * linear(x, up), down) for x, gate, up, down in parts])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_way_to_compute_experts_equals_a_loop(way: str, dtype: torch.dtype) -> None:
    if way == "grouped" and experts_module.can_group.__globals__["_grouped_mm"] is None:
        pytest.skip("this torch has no grouped product")
    experts = filled(experts_of(small(), plain_operators=way == "plain"), dtype)
    x_RD = torch.randn(int(ROWS.sum()), 48, dtype=dtype, requires_grad=True)
    grad_RD = torch.randn(x_RD.shape, dtype=dtype)
    inputs = (x_RD, *experts.parameters())
    wanted = reference(experts.float(), x_RD.float())
    gradients = torch.autograd.grad(wanted, (x_RD, *experts.parameters()), grad_RD.float())
    experts.to(dtype)
    found = compute(experts, x_RD, way)
    limits = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.25, "rtol": 0.1}
    torch.testing.assert_close(found.float(), wanted, **limits)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, grad_RD), gradients, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), **limits)


def test_experts_without_rows_have_gradients_of_zero() -> None:
    experts = filled(experts_of(small()), torch.float32)
    out = experts(torch.zeros(0, 48, requires_grad=True), torch.zeros(6, dtype=torch.int64))
    out.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def test_a_full_expert_keeps_its_most_probable_tokens_and_the_earlier_of_two() -> None:
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    dispatch = plan_dispatch(route(logits, 1, normalized=False), capacity=2)
    assert dispatch.kept_NK is not None
    assert dispatch.kept_NK.flatten().tolist() == [False, True, True, False, True]
    assert dispatch.assigned_E.tolist() == [4, 1]
    assert dispatch.row_NK.flatten()[[1, 2, 4]].tolist() == [0, 1, 2]
    assert expert_capacity(1.25, 10, 2, 6) == 5  # 4.17, rounded up


def test_dropped_tokens_get_nothing_and_others_what_they_get_without_a_capacity() -> None:
    layer = filled(moe_of(small()), torch.float32)
    x_BTD = torch.randn(2, 16, 48, requires_grad=True)
    with torch.no_grad():
        complete = layer(x_BTD)
    layer.capacity_factor = 6.0  # nothing is dropped
    torch.testing.assert_close(layer(x_BTD), complete, atol=1e-5, rtol=1e-5)
    layer.capacity_factor = 0.6
    torch.testing.assert_close(layer.eval()(x_BTD), complete)
    out = layer.train()(x_BTD)
    routing = route(layer.router(x_BTD.flatten(0, 1)), 3, normalized=True)
    dispatch = plan_dispatch(routing, capacity=expert_capacity(0.6, 32, 3, 6))
    assert dispatch.kept_NK is not None
    expected = []
    for token, kept in zip(x_BTD.flatten(0, 1), dispatch.kept_NK, strict=True):
        index = len(expected)
        chosen = zip(routing.experts_NK[index].tolist(), routing.weights_NK[index], kept.tolist(), strict=True)
        rows = [weight * linear(silu(linear(token, layer.experts.gate[expert])) *
                                linear(token, layer.experts.up[expert]), layer.experts.down[expert])
                for expert, weight, keep in chosen if keep]
        expected.append(torch.stack(rows).sum(0) if rows else torch.zeros(48))
    wanted = torch.stack(expected).view_as(out)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    inputs = (x_BTD, *layer.parameters())
    for ours, theirs in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, inputs, grad),
                            strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_statistics_are_recorded_once_for_each_backward_pass() -> None:
    layer = filled(moe_of(small()), torch.float32)
    losses = train_routers(layer, small(), load_balancing=0.1, z_loss=0.0, capacity_factor=0.5)
    assert losses is not None
    x_BTD = torch.randn(2, 16, 48, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x_BTD, use_reentrant=False).sum().backward()
    layer(x_BTD)  # no backward pass, as in an evaluation
    assert losses._counts == {0: 1}
    balance, _, load, dropped, entropy = losses.take()[0].tolist()
    assert 0.5 < balance < 6
    assert 1 <= load <= 2  # each token has 3 of 6 experts
    assert 0.4 < dropped < 0.7
    assert 0 < entropy < 1.8
    assert losses.take() == {}
