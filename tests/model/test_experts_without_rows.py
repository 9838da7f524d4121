"""Experts to which no rank sends a token have the gradient 0: without one, ranks with the same experts would wait."""

import torch

from pretrain.model.config import load_model_config
from tests.model.test_experts import experts_of


def test_matrices_without_rows_have_gradients_of_zero() -> None:
    config = load_model_config("tiny-moe")
    experts = experts_of(config)
    rows_RD = torch.empty(0, config.hidden_size, requires_grad=True)
    out_RD = experts(rows_RD, torch.zeros(config.num_experts, dtype=torch.int64))
    assert out_RD.shape == rows_RD.shape
    out_RD.sum().backward()
    for matrix in experts.parameters():
        assert matrix.grad is not None
        assert not matrix.grad.any()
