"""Attention on CPUs from matrix products, compared with eager operators, for all features together; documents."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.extensions.cpu_kernels import attention_products
from pretrain.extensions.cpu_kernels.attention_products import AttentionByProducts, Scores, _CausalAttention
from pretrain.model.kernels.documents import divide
from pretrain.model.kernels.torch_attention import alibi_slopes
from tests.support.reference_attention import (
    alone,
    as_arguments,
    documents_of,
    eager_attention,
    heads,
    output_and_gradients,
)
from tests.support.tensors import relative_error, saved_by

attention = AttentionByProducts().attend


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 3 queries, and one sample at a time."""
    monkeypatch.setattr(attention_products, "ATTENTION_ROWS", 3)
    monkeypatch.setattr(attention_products, "CPU_SCORES", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["", "alibi"])
def test_the_operator_equals_eager_attention(slopes, softcap):
    """Lengths and windows below, at and above the length of a block, for all head counts."""
    for length, window, kv_heads in itertools.product((1, 3, 7), (0, 1, 2, 3, 4, 6), (1, 2, 4)):
        if window >= length:
            continue
        *inputs, grad = heads(2, 4, kv_heads, length, 4, torch.float64)
        scores = Scores(0.3, window, softcap, slopes)
        exact = output_and_gradients(eager_attention, inputs, grad, scores)
        seen = output_and_gradients(_CausalAttention.apply, inputs, grad, scores)
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
    mine = output_and_gradients(attention, inputs, grad, **as_arguments(scores))
    theirs = output_and_gradients(eager_attention, inputs, grad, scores)
    for my, their, wanted in zip(mine, theirs, exact, strict=True):
        assert my.dtype == torch.bfloat16
        assert relative_error(my, wanted) < 1.3 * relative_error(their, wanted) + 1e-3


@pytest.mark.parametrize("arguments", [{}, {"scale": 0.3, "window": 9, "softcap": 2.0,
                                            "alibi_slopes": alibi_slopes(4)}], ids=["usual", "all_features"])
def test_attention_saves_only_its_inputs(arguments):
    q, k, v, _ = heads(2, 4, 2, 64, 16, torch.bfloat16)
    _, saved = saved_by(lambda *inputs: attention(*inputs, **arguments), q, k, v)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v)}


def test_keys_before_the_window_are_not_read():
    """NaN in keys and values reaches every score that is computed, also those that a mask then hides."""
    *inputs, grad = heads(1, 4, 2, 600, 16, torch.bfloat16)
    with torch.no_grad():
        inputs[1][:, :, :100] = inputs[2][:, :, :100] = math.nan
    out, *gradients = output_and_gradients(attention, inputs, grad, window=20)
    assert out[:, :, :120].isnan().any()
    assert all(x[:, :, 256:].isfinite().all() for x in (out, *gradients))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["", "alibi"])
@pytest.mark.parametrize("lengths", [((11,), (1, 10)), ((3, 4, 4), (9, 2)), ((1,) * 11, (2, 1, 5, 3))], ids=str)
def test_the_operator_equals_each_document_alone(slopes, softcap, lengths):
    """Documents that begin at, before and after the bounds of blocks of 3 queries."""
    for window, kv_heads in itertools.product((0, 1, 2, 3, 4, 6), (1, 2, 4)):
        *inputs, grad = heads(2, 4, kv_heads, 11, 4, torch.float64)
        scores = Scores(0.3, window, softcap, slopes)
        documents = documents_of(*lengths)
        expected = output_and_gradients(lambda *x, s=scores, d=documents: alone(eager_attention, x, d, s), inputs, grad)
        with_documents = Scores(0.3, window, softcap, slopes, documents)
        seen = output_and_gradients(_CausalAttention.apply, inputs, grad, with_documents)
        torch.testing.assert_close(seen, expected, msg=lambda m, at=(window, kv_heads): f"{at}: {m}")


@pytest.mark.parametrize("lengths", [(700,), (130, 570), (300, 5, 5, 390), (7,) * 100],
                         ids=["whole", "two", "four", "hundred"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_operator_for_cpus_is_as_precise_as_without_documents(lengths, dtype):
    *inputs, grad = heads(2, 4, 2, 700, 32, dtype)
    exact_inputs, documents = [x.detach().double().requires_grad_() for x in inputs], documents_of(lengths, (350, 350))
    scores = Scores(32**-0.5)
    exact = output_and_gradients(lambda *x: alone(eager_attention, x, documents, scores), exact_inputs, grad.double())
    mine = output_and_gradients(attention, inputs, grad, documents=documents)
    theirs = output_and_gradients(lambda *x: alone(eager_attention, x, documents, scores), inputs, grad)
    for my, their, wanted in zip(mine, theirs, exact, strict=True):
        assert relative_error(my, wanted) < 1.3 * relative_error(their, wanted) + (1e-3 if my.itemsize == 2 else 1e-6)


def test_keys_before_the_document_of_a_block_are_not_read():
    """NaN in keys and values reaches every score that is computed, also those that a mask then hides."""
    *inputs, grad = heads(1, 4, 2, 600, 16, torch.bfloat16)
    with torch.no_grad():
        inputs[1][:, :, :400] = inputs[2][:, :, :400] = math.nan
    out, *gradients = output_and_gradients(attention, inputs, grad, documents=documents_of((400, 200)))
    assert out[:, :, :400].isnan().all()
    assert all(x[:, :, 400:].isfinite().all() for x in (out, *gradients))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 20))
def test_blocks_contain_each_query_once(lengths: list[int], rows: int) -> None:
    starts = [0, *itertools.accumulate(lengths)]
    length = starts.pop()
    blocks = divide(starts, length, rows)
    assert [row for block in blocks for row in range(block.rows.start, block.rows.stop)] == list(range(length))
    for block in blocks:
        assert 1 <= block.rows.stop - block.rows.start <= rows
        assert block.first_key == max(start for start in starts if start <= block.rows.start)
        assert block.starts == tuple(start for start in starts if block.rows.start < start < block.rows.stop)
    assert len(blocks) <= 2 * -(-length // rows)
