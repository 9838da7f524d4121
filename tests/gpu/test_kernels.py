"""The kernels of a GPU compared with torch's separate operators."""

import pytest
import torch

from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.flex_attention import flex_causal_attention, why_not_flex
from pretrain.model.kernels.fused_loss import CROSS_ENTROPY, LossTerms, fused_linear_cross_entropy
from pretrain.model.kernels.torch_attention import alibi_slopes, torch_causal_attention
from pretrain.model.layers.experts import can_group
from tests.gpu.runs import kernels_compute, relative_error
from tests.model.test_experts import experts_of, filled, reference, small


@pytest.mark.parametrize(("head_size", "half"), [(16, torch.float16), (32, torch.bfloat16), (64, torch.bfloat16),
                                                 (128, torch.bfloat16), (256, torch.bfloat16), (256, torch.float16)])
@pytest.mark.parametrize(("window", "softcap", "alibi", "is_packed", "kv_heads"), [
    (0, 0.0, False, True, 8), (300, 0.0, False, True, 2), (0, 0.0, True, False, 8), (0, 30.0, False, False, 2)])
def test_flex_attention_equals_dense_masks(head_size, half, window, softcap, alibi, is_packed, kv_heads):
    """Errors against fp32 are about as large as with torch's operators in 16 bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 1024, head_size, generator=generator, device="cuda", dtype=half)
                     for heads in (8, kv_heads, kv_heads, 8))
    assert why_not_flex(q, dropout=0.0, on_cuda=True) == ""
    positions_BT = (torch.arange(1024, device="cuda") % 417).expand(2, -1)
    how = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes(8) if alibi else None, "scale": 0.1}
    results = {}
    for name, operator, dtype in (("exact", torch_causal_attention, torch.float32),
                                  ("torch", torch_causal_attention, half), ("flex", flex_causal_attention, half)):
        if operator is torch_causal_attention and not kernels_compute():
            continue  # a dry GPU has no cuDNN, which torch prefers on newer capabilities
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        plain = {} if operator is flex_causal_attention else {"plain": True}
        out = operator(*leaves, documents=Documents(positions_BT) if is_packed else None, **how, **plain)
        results[name] = [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]
    for exact, torchs, flex in zip(*results.values(), strict=True) if kernels_compute() else ():
        assert relative_error(flex.float(), exact) < max(2 * relative_error(torchs.float(), exact), 0.01)


@pytest.mark.parametrize("terms", [CROSS_ENTROPY, LossTerms(label_smoothing=0.1, z_loss=1e-3)])
def test_the_fused_loss_waits_for_nothing_and_is_precise(terms):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2, 1500, 256, generator=generator, device="cuda")
    weight = torch.randn(5003, 256, generator=generator, device="cuda") / 16
    labels = torch.randint(0, 5003, (2, 1500), generator=generator, device="cuda")
    weights = torch.full((2, 1500), 1 / 3000, device="cuda")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, _ = fused_linear_cross_entropy(leaves[0], leaves[1], labels, weights, terms=terms)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([loss.detach(), *(leaf.grad.float() for leaf in leaves)])
    assert float(results[1][0]) == pytest.approx(float(results[0][0]), rel=1e-3)
    for found, expected in zip(results[1][1:], results[0][1:], strict=True):
        assert relative_error(found, expected) < 0.02


def test_grouped_experts_wait_for_nothing_and_are_precise():
    """Eight experts, of which one has no rows. Before compute capability 9.0, torch reads the numbers of rows."""
    rows_E = torch.tensor([300, 0, 17, 1, 512, 64, 5, 125], device="cuda")
    config = small(num_experts=8, hidden_size=256, moe_intermediate_size=384)
    experts = filled(experts_of(config), torch.float32).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    x_RD, grad_RD = (torch.randn(1024, 256, generator=generator, device="cuda") for _ in range(2))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x_RD.to(dtype, copy=True).requires_grad_(), *experts.to(dtype).parameters()]
        if dtype == torch.float32:
            out = reference(experts, leaves[0], rows_E)
            results.append([out, *torch.autograd.grad(out, leaves, grad_RD)])
            continue
        assert can_group(leaves[0], experts.up)
        torch.cuda.set_sync_debug_mode("error" if torch.cuda.get_device_capability() >= (9, 0) else "default")
        try:
            out = experts(leaves[0], rows_E)
            results.append([out, *torch.autograd.grad(out, leaves, grad_RD.to(dtype))])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for found, expected in zip(results[1], results[0], strict=True):
        assert relative_error(found.float(), expected) < 0.02
