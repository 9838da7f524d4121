"""Attention in C in fp32, compared with torch's operator in fp64; which attentions it computes."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.extensions.cpu_kernels.attention_in_c import attention_fp32
from pretrain.extensions.cpu_kernels.choice import ALL_IN_C, set_choice
from pretrain.extensions.cpu_kernels.kernels import _is_attention_in_fp32
from pretrain.extensions.cpu_kernels.library import has_library
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.torch_attention import AttentionSettings, Rotation, alibi_slopes
from tests.support.tensors import relative_error, saved_by

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")


def in_c(qkv: torch.Tensor, settings: AttentionSettings) -> torch.Tensor:
    return attention_fp32(qkv, settings.num_heads, settings.scale)


def in_torch(qkv: torch.Tensor, settings: AttentionSettings) -> torch.Tensor:
    heads = settings.num_heads
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = (x.transpose(1, 2) for x in qkv.split((heads, kv_heads, kv_heads), 2))
    out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True,
                                                       scale=settings.scale or None)
    return out.transpose(1, 2)


def inputs(batch: int, length: int, heads: int, kv_heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(batch, length, heads + 2 * kv_heads, size, generator=generator)
    return qkv, torch.randn(batch, length, heads, size, generator=generator)


def results(function, qkv, grad, settings, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    copy = qkv.to(dtype, copy=True).requires_grad_()
    out = function(copy, settings)
    return out.detach(), *torch.autograd.grad(out, copy, grad.to(dtype))


@pytest.mark.parametrize(("sizes", "scale"), [((2, 64, 4, 4, 32), 0.0), ((1, 1, 2, 1, 32), 0.0),
                                              ((3, 37, 4, 2, 64), 0.3), ((2, 150, 2, 1, 96), 0.0)])
def test_attention_in_fp32_is_as_exact_as_torchs_and_does_not_depend_on_the_threads(sizes, scale):
    (qkv, grad), settings = inputs(*sizes), AttentionSettings(sizes[2], sizes[3], scale)
    exact = results(in_torch, qkv, grad, settings, torch.float64)
    torchs, threads, found = results(in_torch, qkv, grad, settings), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(results(in_c, qkv, grad, settings))
    finally:
        torch.set_num_threads(threads)
    for one, three, theirs, wanted in zip(*found, torchs, exact, strict=True):
        assert torch.equal(one, three)
        assert relative_error(one, wanted) <= 1.5 * relative_error(theirs, wanted) + 1e-7


def test_later_positions_change_nothing_and_large_scores_and_nan_are_correct():
    qkv, grad = inputs(1, 70, 2, 2, 32)
    settings = AttentionSettings(2, 2)
    before, _ = results(in_c, qkv, grad, settings)
    qkv[:, 50:] = float("nan")
    after, gradient = results(in_c, qkv, grad, settings)
    assert torch.equal(after[:, :48], before[:, :48])
    assert after[:, 50:].isnan().all()
    assert gradient.isnan().any()
    large, grad = inputs(1, 40, 2, 2, 32)
    found, theirs = (results(function, 30 * large, grad, settings) for function in (in_c, in_torch))
    wanted = results(in_torch, 30 * large, grad, settings, torch.float64)
    for mine, torchs, exact in zip(found, theirs, wanted, strict=True):
        assert relative_error(mine, exact) <= 1.5 * relative_error(torchs, exact) + 1e-7


def test_it_saves_its_input_its_output_and_a_number_for_each_query():
    qkv = inputs(2, 8, 4, 2, 32)[0].requires_grad_()
    out, saved = saved_by(attention_fp32, qkv, 4)
    assert sorted(tensor.numel() for tensor in saved) == sorted((qkv.numel(), out.numel(), 2 * 4 * 8))


@pytest.fixture
def all_in_c() -> Iterator[None]:
    set_choice(ALL_IN_C)
    yield
    set_choice(None)


def is_in_c(qkv: torch.Tensor, heads: int, dropout: float = 0.0, *, rope: Rotation | None = None,
            documents: Documents | None = None, inputs: tuple[torch.Tensor, ...] = (), **settings: Any) -> bool:
    return _is_attention_in_fp32(inputs or (qkv,), AttentionSettings(2, heads, **settings), rope, documents, dropout)


def test_only_the_usual_attention_is_computed_in_c(all_in_c: None) -> None:
    qkv, threads = inputs(1, 12, 2, 1, 32)[0], torch.get_num_threads()
    others = {"window": 4, "softcap": 30.0, "alibi_slopes": alibi_slopes(2), "rope": mock.Mock(),
              "documents": Documents(torch.arange(12)[None] % 5)}
    usual = {"window": 12, "documents": Documents(torch.arange(12)[None])}
    assert is_in_c(qkv, threads, **usual)
    for name, value in others.items():
        assert not is_in_c(qkv, threads, **{name: value}), name
    assert not is_in_c(qkv, threads, 0.1, **usual)
    assert not is_in_c(qkv, threads - 1, **usual)  # a thread would have no head
    assert not is_in_c(qkv, threads, inputs=qkv.split((2, 1, 1), 2), **usual)
    assert not is_in_c(qkv[..., :16].contiguous(), threads, **usual)
    assert not is_in_c(qkv.bfloat16(), threads, **usual)
    set_choice(ALL_IN_C - {"attention_fp32"})
    assert not is_in_c(qkv, threads, **usual)
