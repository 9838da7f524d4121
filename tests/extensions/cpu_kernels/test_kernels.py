"""Offers to the operators: where they apply, and the fused loss with them."""


import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch._subclasses.fake_tensor import FakeTensorMode

from pretrain.extensions.cpu_kernels import choice, kernels, library
from pretrain.model.kernels import fused_loss
from pretrain.model.kernels.activation import activate, activated_linear
from tests.support.reference_loss import (
    check_error_of_fused_loss,
)


@pytest.mark.skipif(not library.has_library(), reason="no C compiler")
@pytest.mark.parametrize("tokens", [1024, 8192, 32768])
def test_the_error_of_the_fused_loss_does_not_grow_with_the_tokens(tokens, monkeypatch):
    """The gradients of all tokens are summed in fp32, as by torch's single product."""
    assert isinstance(fused_loss.LOSS.choose(torch.empty(1).bfloat16()), kernels.TransposedLossInC)
    monkeypatch.setattr(kernels, "CPU_PRODUCT", 32 * 100)  # parts of 100 words, the last one with 57
    check_error_of_fused_loss(tokens, torch.bfloat16)


def test_fake_tensors_are_not_passed_to_c_code():
    with FakeTensorMode():
        up, weight = torch.randn(2, 3, 6, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, 6).bfloat16()
        assert not library.is_real(up)
        activated_linear("gelu_tanh", up, None, weight, None).sum().backward()
        assert up.grad.shape == up.shape


def test_without_a_compiler_torchs_operators_are_used(monkeypatch):
    monkeypatch.setattr(choice, "right_in_c", lambda: frozenset())
    x = torch.randn(100).bfloat16()
    assert torch.equal(activate("gelu_tanh", x), F.gelu(x, approximate="tanh"))
