"""Attention: the custom operator and torch's operators compared with eager operators, for all features together."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from pretrain.model.kernels import cpu_attention, torch_attention
from pretrain.model.kernels.cpu_attention import Scores, _CausalAttention, causal_attention
from pretrain.model.kernels.torch_attention import alibi_slopes, torch_causal_attention
from tests.support.reference_attention import eager_attention
from tests.support.tensors import relative_error, saved_by


def heads(batch: int, heads: int, kv_heads: int, length: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k and v with the memory layout of the projection's output, and a gradient of the attention's output."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(batch, length, n, size, generator=generator).to(dtype).transpose(1, 2) for n in sizes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def as_arguments(scores: Scores) -> dict:
    return {"scale": scores.scale, "window": scores.window, "softcap": scores.softcap,
            "alibi_slopes": scores.alibi_slopes}


def output_and_gradients(compute, inputs, grad, *arguments, **keywords) -> list[torch.Tensor]:
    out = compute(*inputs, *arguments, **keywords)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 3 queries, and one sample at a time."""
    monkeypatch.setattr(cpu_attention, "ATTENTION_ROWS", 3)
    monkeypatch.setattr(cpu_attention, "CPU_SCORES", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["", "alibi"])
def test_both_operators_equal_eager_attention(slopes, softcap):
    """Lengths and windows below, at and above the length of a block, for all head counts."""
    for length, window, kv_heads in itertools.product((1, 3, 7), (0, 1, 2, 3, 4, 6), (1, 2, 4)):
        if window >= length:
            continue
        *inputs, grad = heads(2, 4, kv_heads, length, 4, torch.float64)
        scores = Scores(0.3, window, softcap, slopes)
        exact = output_and_gradients(eager_attention, inputs, grad, scores)
        for seen in (output_and_gradients(_CausalAttention.apply, inputs, grad, scores),
                     output_and_gradients(torch_causal_attention, inputs, grad, **as_arguments(scores))):
            torch.testing.assert_close(seen, exact, msg=lambda m, at=(length, window, kv_heads): f"{at}: {m}")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scores", [Scores(0.5), Scores(0.7, 4, 1.5, alibi_slopes(4))], ids=["usual", "all_features"])
def test_gradients_of_attention_equal_numerical_derivatives(scores, kv_heads):
    q, k, v, _ = heads(2, 4, kv_heads, 7, 4, torch.float64)
    torch.testing.assert_close(_CausalAttention.apply(q, k, v, scores), eager_attention(q, k, v, scores))
    assert torch.autograd.gradcheck(lambda *inputs: _CausalAttention.apply(*inputs, scores), (q, k, v))


@pytest.mark.parametrize(("length", "kv_heads", "scores"), [
    (40, 4, Scores(0.125)), (300, 4, Scores(0.125)), (300, 1, Scores(0.125)), (300, 2, Scores(0.125, 2)),
    (300, 2, Scores(0.125, 128)), (257, 2, Scores(0.125, 129)), (300, 2, Scores(0.2, 200, 0.0, alibi_slopes(4))),
    (300, 2, Scores(0.125, 40, 2.0)), (520, 4, Scores(0.125, 0, 0.0, alibi_slopes(4)))])
def test_attention_in_bf16_is_as_precise_as_eager_attention(length, kv_heads, scores):
    *inputs, grad = heads(3, 4, kv_heads, length, 64, torch.bfloat16)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = output_and_gradients(eager_attention, exact_inputs, grad.double(), scores)
    mine = output_and_gradients(causal_attention, inputs, grad, **as_arguments(scores))
    theirs = output_and_gradients(eager_attention, inputs, grad, scores)
    for my, their, wanted in zip(mine, theirs, exact, strict=True):
        assert my.dtype == torch.bfloat16
        assert relative_error(my, wanted) < 1.3 * relative_error(their, wanted) + 1e-3


@pytest.mark.parametrize("arguments", [{}, {"scale": 0.3, "window": 9, "softcap": 2.0,
                                            "alibi_slopes": alibi_slopes(4)}], ids=["usual", "all_features"])
def test_attention_saves_only_its_inputs(arguments):
    q, k, v, _ = heads(2, 4, 2, 64, 16, torch.bfloat16)
    _, saved = saved_by(lambda *inputs: causal_attention(*inputs, **arguments), q, k, v)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v)}


def test_keys_before_the_window_are_not_read():
    """NaN in keys and values reaches every score that is computed, also those that a mask then hides."""
    *inputs, grad = heads(1, 4, 2, 600, 16, torch.bfloat16)
    with torch.no_grad():
        inputs[1][:, :, :100] = inputs[2][:, :, :100] = math.nan
    out, *gradients = output_and_gradients(causal_attention, inputs, grad, window=20)
    assert out[:, :, :120].isnan().any()
    assert all(x[:, :, 256:].isfinite().all() for x in (out, *gradients))


def test_attention_with_dropout_or_in_fp32_uses_torchs_operator():
    for dtype, dropout in ((torch.float32, 0.0), (torch.bfloat16, 0.5)):
        for window in (0, 32, 100):  # no window is shorter than the sequence
            q, k, v, _ = heads(2, 4, 4, 32, 16, dtype)
            torch.manual_seed(1)
            mine = causal_attention(q, k, v, dropout=dropout, window=window)
            torch.manual_seed(1)
            assert torch.equal(mine, F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout))


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_dropout_scales_the_probabilities_that_it_keeps(softcap):
    q, k, _, _ = heads(2, 4, 2, 20, 20, torch.float32)
    v = torch.eye(20).expand(2, 2, 20, 20)  # the output is the matrix of probabilities
    keywords = {"window": 7, "softcap": softcap, "alibi_slopes": alibi_slopes(4)}
    p, dropped = causal_attention(q, k, v, **keywords), causal_attention(q, k, v, dropout=0.5, **keywords)
    kept = dropped != 0
    assert 0.3 < kept.sum() / (p != 0).sum() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * p[kept])


def test_layers_share_one_mask():
    q, k, v, _ = heads(1, 4, 2, 50, 16, torch.float32)
    torch_attention._visible.cache_clear()
    torch_attention._alibi.cache_clear()
    with torch.inference_mode():  # a mask made here can be used in training
        torch_causal_attention(q, k, v, window=30)
        torch_causal_attention(q, k, v, alibi_slopes=alibi_slopes(4))
    for _ in range(3):
        torch_causal_attention(q, k, v, window=30).sum().backward()
        torch_causal_attention(q, k, v, alibi_slopes=alibi_slopes(4)).sum().backward()
    assert torch_attention._alibi.cache_info().misses == 1
    assert torch_attention._visible.cache_info().misses == 2


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 20, 71, 112])
def test_alibi_slopes_equal_those_of_bloom_and_mpt(num_heads):
    bloom_H = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]  # at position 1
    torch.testing.assert_close(alibi_slopes(num_heads), bloom_H, rtol=2e-6, atol=0)
    bias_HT = build_mpt_alibi_tensor(num_heads, 5)[:, 0]
    torch.testing.assert_close(alibi_slopes(num_heads), -bias_HT[:, -2], rtol=2e-6, atol=0)
