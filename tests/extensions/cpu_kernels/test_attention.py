"""Attention in C: values and gradients compared with attention computed from its definition."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from pretrain.extensions.cpu_kernels import attention_in_c as module
from pretrain.extensions.cpu_kernels.attention_in_c import AttentionSettings, attention, instructions
from pretrain.extensions.cpu_kernels.choice import ALL_IN_C, set_choice
from pretrain.extensions.cpu_kernels.kernels import _is_attention_in_c
from pretrain.extensions.cpu_kernels.library import has_library
from pretrain.model.kernels import torch_attention
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.torch_attention import alibi_slopes
from tests.support.reference_attention import documents_of, eager_attention
from tests.support.tensors import relative_error, saved_by

pytestmark = pytest.mark.skipif(not has_library() or instructions() == 0, reason="no dot products of bf16")
KINDS = [pytest.param(1, id="vectors"), pytest.param(2, id="tiles", marks=pytest.mark.skipif(
    not has_library() or instructions() < 2, reason="no AMX"))]


@pytest.fixture(params=KINDS)
def kind(request):
    """Use the vectors also on a CPU with AMX."""
    with mock.patch.object(module, "instructions", return_value=request.param):
        yield request.param


def tables(length: int, rotary: int, documents: Documents | None) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(0, rotary, 2) / rotary))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    if documents is None:
        return cos, sin
    return cos[documents.positions_BT][:, None], sin[documents.positions_BT][:, None]


def rotated(x_BHTE: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = (table.to(x_BHTE.dtype) for table in tables)
    size = 2 * cos.shape[-1]
    a, b = x_BHTE[..., :size].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x_BHTE[..., size:]), -1)


def eager(inputs: tuple[torch.Tensor, ...], settings: AttentionSettings) -> torch.Tensor:
    """Compute the operator from its definition in the dtype of the inputs."""
    heads = settings.num_heads
    if len(inputs) == 1:
        kv_heads = (inputs[0].shape[2] - heads) // 2
        inputs = inputs[0].split((heads, kv_heads, kv_heads), 2)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    if settings.tables is not None:
        q, k = rotated(q, settings.tables), rotated(k, settings.tables)
    return eager_attention(q, k, v, settings).transpose(1, 2)


def value_and_gradients(function, inputs, settings, grad) -> list[torch.Tensor]:
    value = function(inputs, settings)
    return [value, *torch.autograd.grad(value, inputs, grad)]


def random_inputs(batch: int, length: int, heads: tuple[int, ...],
                  size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return tensors with these numbers of heads, the last one for a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    *inputs, grad = (torch.randn(batch, length, count, size, generator=generator).bfloat16() for count in heads)
    return [x.requires_grad_() for x in inputs], grad


PLAIN = AttentionSettings(num_heads=4)
ALL = AttentionSettings(4, 0.2, 100, 2.0, alibi_slopes(4))


@pytest.mark.parametrize(("length", "kv_heads", "size", "rotary", "settings"), [
    (1, 4, 16, 0, PLAIN), (31, 1, 10, 4, PLAIN), (64, 2, 64, 64, PLAIN), (300, 4, 64, 16, PLAIN),
    (300, 2, 80, 80, replace(PLAIN, window=2)), (257, 1, 128, 0, replace(PLAIN, window=129)),
    (600, 2, 64, 64, replace(PLAIN, scale=0.3)), (1100, 2, 32, 0, PLAIN), (200, 2, 64, 0, ALL), (129, 4, 20, 8, ALL),
    (600, 1, 40, 0, replace(PLAIN, softcap=1.0)), (150, 2, 32, 0, replace(PLAIN, alibi_slopes=alibi_slopes(4)))])
@pytest.mark.parametrize("separate", [False, True], ids=["qkv", "q_k_v"])
def test_attention_is_as_precise_as_torchs_operators(kind, length, kv_heads, size, rotary, settings, separate):
    heads = (4, kv_heads, kv_heads, 4) if separate else (4 + 2 * kv_heads, 4)
    inputs, grad = random_inputs(2, length, heads, size)
    settings = replace(settings, tables=tables(length, rotary, None) if rotary else None)
    check_precision(inputs, settings, grad)


@pytest.mark.parametrize("window", [0, 50])
def test_queries_see_only_their_document(kind, window):
    documents = documents_of((200, 1, 30, 69), (33, 267))
    inputs, grad = random_inputs(2, 300, (8, 4), 64)
    check_precision(inputs, AttentionSettings(4, window=window, tables=tables(300, 32, documents),
                                              documents=documents), grad)


def check_precision(inputs: list[torch.Tensor], settings: AttentionSettings, grad: torch.Tensor) -> None:
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = value_and_gradients(eager, exact_inputs, settings, grad.double())
    theirs = value_and_gradients(eager, inputs, settings, grad)
    mine = value_and_gradients(attention, inputs, settings, grad)
    for my, their, wanted in zip(mine, theirs, exact, strict=True):
        assert (my.dtype, my.shape) == (torch.bfloat16, wanted.shape)
        if wanted.count_nonzero():
            assert relative_error(my, wanted) < 1.1 * relative_error(their, wanted) + 1e-3
        else:  # a query that sees one key
            assert my.abs().max() < 1e-5


def test_inputs_need_not_be_contiguous(kind):
    (qkv,), grad = random_inputs(2, 70, (8, 4), 32)
    wanted = value_and_gradients(attention, [qkv], PLAIN, grad)
    padded = torch.cat((qkv, qkv), 3).detach()[..., :32].requires_grad_()
    swapped = grad.transpose(0, 1).contiguous().transpose(0, 1)
    assert all(map(torch.equal, value_and_gradients(attention, [padded], PLAIN, swapped), wanted))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_reach_the_queries_that_see_them(kind, value):
    (qkv,), grad = random_inputs(1, 200, (8, 4), 32)
    with torch.no_grad():
        qkv[:, 100, 4:6] = value  # the keys
    out, dqkv = value_and_gradients(attention, [qkv], replace(PLAIN, window=40), grad)
    seen = slice(100, 140)
    assert all(x.isnan().any(-1).all() for x in (out[:, seen], dqkv[:, seen, :4]))
    assert all(x.isfinite().all() for x in (out[:, :100], out[:, 140:], dqkv[:, :32]))


def test_settings_may_be_whole_numbers(kind):
    """MPT's softmax_scale in a config.json may be 1. C expects floats, which are passed in other registers."""
    (qkv,), _ = random_inputs(1, 70, (8, 4), 32)
    whole, fractions = (attention((qkv,), replace(PLAIN, scale=one, softcap=two)) for one, two in ((1, 2), (1.0, 2.0)))
    assert torch.equal(whole, fractions)


def test_large_scores_do_not_overflow(kind):
    inputs, grad = random_inputs(1, 90, (8, 4), 32)
    check_precision(inputs, replace(PLAIN, scale=200.0), grad)


def test_results_do_not_depend_on_the_number_of_threads(kind):
    inputs, grad = random_inputs(3, 150, (8, 4), 64)
    seen, threads = [], torch.get_num_threads()
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        seen.append(value_and_gradients(attention, inputs, PLAIN, grad))
    torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for others in seen[1:] for x, y in zip(seen[0], others, strict=True))


def test_attention_saves_its_input_its_output_and_a_number_for_each_query_and_head():
    (qkv,), _ = random_inputs(2, 64, (8, 4), 32)
    out, saved = saved_by(lambda x: attention((x,), replace(PLAIN, tables=tables(64, 32, None))), qkv)
    assert sorted(x.numel() for x in saved) == sorted([qkv.numel(), out.numel(), 2 * 4 * 64])


def test_attention_is_in_c_if_each_thread_has_a_head():
    qkv, threads = torch.empty(2, 5, 8, 16, dtype=torch.bfloat16), torch.get_num_threads()
    torch.set_num_threads(4)
    two, one = (torch_attention.AttentionSettings(8 - 2 * heads, heads) for heads in (2, 1))
    usual = [_is_attention_in_c((qkv,), two, None, None, 0.0), _is_attention_in_c((qkv,), one, None, None, 0.0),
             _is_attention_in_c((qkv,), two, None, None, 0.1), _is_attention_in_c((qkv.float(),), two, None, None, 0.0)]
    set_choice(ALL_IN_C - {"attention"})
    not_chosen = _is_attention_in_c((qkv,), two, None, None, 0.0)
    set_choice(None)
    torch.set_num_threads(threads)
    assert (usual, not_chosen) == ([True, False, False, False], False)
