"""Attention by torch's operators compared with eager operators, for all features together."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from pretrain.model.kernels import torch_attention
from pretrain.model.kernels.torch_attention import (
    AttentionKernel,
    AttentionSettings,
    alibi_slopes,
    torch_causal_attention,
)
from tests.support.reference_attention import as_arguments, eager_attention, heads, output_and_gradients


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["", "alibi"])
def test_torchs_operators_equal_eager_attention(slopes, softcap):
    """All lengths, windows and head counts."""
    for length, window, kv_heads in itertools.product((1, 3, 7), (0, 1, 2, 3, 4, 6), (1, 2, 4)):
        if window >= length:
            continue
        *inputs, grad = heads(2, 4, kv_heads, length, 4, torch.float64)
        settings = AttentionSettings(4, kv_heads, 0.3, window, softcap, slopes)
        exact = output_and_gradients(eager_attention, inputs, grad, settings)
        seen = output_and_gradients(torch_causal_attention, inputs, grad, **as_arguments(settings))
        torch.testing.assert_close(seen, exact, msg=lambda m, at=(length, window, kv_heads): f"{at}: {m}")


def test_attention_with_dropout_or_in_fp32_is_torchs_operator():
    for dtype, dropout in ((torch.float32, 0.0), (torch.bfloat16, 0.5)):
        for window in (0, 32, 100):  # no window is shorter than the sequence
            q, k, v, _ = heads(2, 4, 4, 32, 16, dtype)
            torch.manual_seed(1)
            settings = AttentionSettings(4, 4, window=window)
            mine = AttentionKernel()(tuple(x.transpose(1, 2) for x in (q, k, v)), settings, None, None, dropout)
            torch.manual_seed(1)
            theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
            assert torch.equal(mine.transpose(1, 2), theirs)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_dropout_scales_the_probabilities_that_it_keeps(softcap):
    q, k, _, _ = heads(2, 4, 2, 20, 20, torch.float32)
    v = torch.eye(20).expand(2, 2, 20, 20)  # the output is the matrix of probabilities
    keywords = {"window": 7, "softcap": softcap, "alibi_slopes": alibi_slopes(4)}
    p, dropped = torch_causal_attention(q, k, v, **keywords), torch_causal_attention(q, k, v, dropout=0.5, **keywords)
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
