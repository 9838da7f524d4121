"""Bytes of activations with the functions in C, and with attention from products, compared with autograd."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from pretrain.extensions.cpu_kernels import memory
from pretrain.extensions.cpu_kernels.choice import ALL_IN_C, right_in_c, set_choice
from pretrain.extensions.cpu_kernels.library import has_library
from pretrain.model.attention_memory import shared_mask_bytes
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layer_memory import block_backward, block_saved
from pretrain.model.operator_memory import MicroBatch
from pretrain.model.recompute import Recompute
from tests.support.activation_bytes import (
    DIFFERENT,
    EACH_BLOCK,
    EACH_LOSS,
    EACH_PEAK,
    EACH_RECOMPUTATION,
    blocks_of,
    check_documents,
    check_layer_groups,
    check_loss,
    check_peak,
    check_saved_bytes,
    config_of,
    one_thread,
    saved_bytes,
)
from tests.support.block_memory import measure_block
from tests.support.operators import forget_estimates

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")


@pytest.fixture(autouse=True)
def attention_from_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute no attention in C, except in the test of it."""
    right_in_c()  # compares the C functions with torch's operators before the measurement
    set_choice(ALL_IN_C - {"attention", "attention_fp32"})
    monkeypatch.setattr(memory, "multiplies_bf16", lambda: False)
    forget_estimates()
    yield
    set_choice(None)
    forget_estimates()


@EACH_BLOCK
def test_saved_bytes_of_a_block_equal_those_of_autograd(name: str, dropout: bool, dtype: torch.dtype,
                                                        part: str) -> None:
    check_saved_bytes(name, part, dtype, dropout=dropout)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral_multi_query", "gemma2", "mpt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_documents_save_no_more_than_whole_samples(name: str, dtype: torch.dtype) -> None:
    config, (batch, length) = config_of(name, dropout=False), (3, 40)
    micro_batch = MicroBatch(batch * length, length, dtype.itemsize, cuda=False, documents=True)
    documents = Documents(torch.tensor([[*range(15), *range(25)]] * batch))
    for block, window in blocks_of(config, dtype):
        x_BTD = torch.randn(batch, length, config.hidden_size, dtype=dtype, requires_grad=True)
        block.attention.prepare(documents, x_BTD)
        shared = [*documents._masks.values(), *(x for pair in documents.rope_tables.values() for x in pair)]
        measured = saved_bytes(partial(block, documents=documents), [*block.parameters(), *shared], x_BTD)
        assert measured <= block_saved(config, micro_batch, window=window)
        if dtype == torch.bfloat16:
            assert measured == block_saved(config, micro_batch, window=window)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral_multi_query", "gemma2", "mpt"])
@pytest.mark.parametrize("dropout", [False, True])
def test_bytes_of_documents_equal_those_of_autograd(name: str, dropout: bool) -> None:
    """Attention from products needs no masks."""
    assert check_documents(name, dropout=dropout) == dropout


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral_multi_query", "mpt"])
def test_attention_in_bf16_has_no_masks(name: str) -> None:
    assert shared_mask_bytes(config_of(name, dropout=False), MicroBatch(3 * 40, 40, 2, cuda=False)) == 0


@EACH_LOSS
def test_saved_and_peak_bytes_of_the_loss(dtype: torch.dtype, tokens: int, vocab_size: int, extras: dict[str, Any],
                                          terms: LossTerms) -> None:
    check_loss(tokens, vocab_size, extras, dtype, terms)


@EACH_RECOMPUTATION
def test_saved_bytes_of_layer_groups_equal_those_of_autograd(name: str, recompute: Recompute) -> None:
    check_layer_groups(name, recompute)


@EACH_PEAK
def test_peak_bytes_of_a_blocks_backward_pass(name: str, dtype: torch.dtype, dropout: bool, batch: int, length: int,
                                              part: str) -> None:
    check_peak(name, part, dtype, batch, length, dropout=dropout)


@pytest.mark.skipif(not memory.multiplies_bf16(), reason="no AVX512_BF16")
@pytest.mark.parametrize("name", DIFFERENT)
@one_thread()
def test_bytes_of_a_block_with_attention_in_c(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    set_choice(None)
    config = config_of(name, dropout=False)
    micro_batch = MicroBatch(2 * 512, 512, 2, cuda=False)
    for block, window in blocks_of(config, torch.bfloat16):
        x_BTD = torch.randn(2, 512, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        shared = list(block.attention.rope.tables(512, x_BTD)) if block.attention.rope else []
        saved = block_saved(config, micro_batch, window=window)
        assert saved_bytes(block, [*block.parameters(), *shared], x_BTD) == saved, window
        _, peak = measure_block(block, x_BTD)
        expected = saved + block_backward(config, micro_batch, window) + block.mlp.down.weight.nbytes
        assert peak == pytest.approx(expected, rel=0.08), window
