"""Document attention: packed documents compute what each document computes alone."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from pretrain.data.loader import document_positions
from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels.cpu_attention import Scores, _CausalAttention, causal_attention
from pretrain.model.kernels.documents import Documents, divide
from pretrain.model.kernels.torch_attention import alibi_slopes, torch_causal_attention
from pretrain.model.layer_specs import CausalLM, as_module, compile_blocks
from pretrain.model.recompute import Recompute
from tests.model.test_attention import as_arguments, heads, output_and_gradients, small_blocks
from tests.support.model_shapes import SHAPES, write_config
from tests.support.reference_attention import documents_of, eager_attention
from tests.support.tensors import relative_error

_FIXTURES = (small_blocks,)
EOD = 0
NAMES = [name for name in SHAPES if name != "llama_dynamic_rope"]  # longer than the model's positions: rejected


def alone(compute, inputs: list[torch.Tensor], documents: Documents, *arguments) -> torch.Tensor:
    """Compute the attention of each document by itself, and concatenate the outputs."""
    samples = []
    for sample, positions_T in enumerate(documents.positions_BT):
        bounds = [*(positions_T == 0).nonzero()[:, 0].tolist(), len(positions_T)]
        parts = ([x[sample:sample + 1, :, start:stop] for x in inputs] for start, stop in itertools.pairwise(bounds))
        samples.append(torch.cat([compute(*part, *arguments) for part in parts], dim=2))
    return torch.cat(samples)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["", "alibi"])
@pytest.mark.parametrize("lengths", [((11,), (1, 10)), ((3, 4, 4), (9, 2)), ((1,) * 11, (2, 1, 5, 3))], ids=str)
def test_both_operators_equal_each_document_alone(slopes, softcap, lengths):
    """Documents that begin at, before and after the bounds of blocks of 3 queries."""
    for window, kv_heads in itertools.product((0, 1, 2, 3, 4, 6), (1, 2, 4)):
        *inputs, grad = heads(2, 4, kv_heads, 11, 4, torch.float64)
        scores = Scores(0.3, window, softcap, slopes)
        documents = documents_of(*lengths)
        expected = output_and_gradients(lambda *x, s=scores, d=documents: alone(eager_attention, x, d, s), inputs, grad)
        with_documents = Scores(0.3, window, softcap, slopes, documents)
        for seen in (output_and_gradients(_CausalAttention.apply, inputs, grad, with_documents),
                     output_and_gradients(torch_causal_attention, inputs, grad, **as_arguments(scores),
                                          documents=documents)):
            torch.testing.assert_close(seen, expected, msg=lambda m, at=(window, kv_heads): f"{at}: {m}")


@pytest.mark.parametrize("lengths", [(700,), (130, 570), (300, 5, 5, 390), (7,) * 100],
                         ids=["whole", "two", "four", "hundred"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_operator_for_cpus_is_as_precise_as_without_documents(lengths, dtype):
    *inputs, grad = heads(2, 4, 2, 700, 32, dtype)
    exact_inputs, documents = [x.detach().double().requires_grad_() for x in inputs], documents_of(lengths, (350, 350))
    scores = Scores(32**-0.5)
    exact = output_and_gradients(lambda *x: alone(eager_attention, x, documents, scores), exact_inputs, grad.double())
    mine = output_and_gradients(causal_attention, inputs, grad, documents=documents)
    theirs = output_and_gradients(lambda *x: alone(eager_attention, x, documents, scores), inputs, grad)
    for my, their, wanted in zip(mine, theirs, exact, strict=True):
        assert relative_error(my, wanted) < 1.3 * relative_error(their, wanted) + (1e-3 if my.itemsize == 2 else 1e-6)


def test_keys_before_the_document_of_a_block_are_not_read():
    """NaN in keys and values reaches every score that is computed, also those that a mask then hides."""
    *inputs, grad = heads(1, 4, 2, 600, 16, torch.bfloat16)
    with torch.no_grad():
        inputs[1][:, :, :400] = inputs[2][:, :, :400] = math.nan
    out, *gradients = output_and_gradients(causal_attention, inputs, grad, documents=documents_of((400, 200)))
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


def build(name: str, folder: Path, **changes: object) -> tuple[ModelConfig, CausalLM]:
    config = load_model_config(write_config(folder, {**SHAPES[name], **changes}))
    module = as_module(config)
    initialize_parameters(module, config, seed=1)
    for number, parameter in enumerate(module.parameters()):  # larger weights, so that every term counts
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    return config, module


def packed(config: ModelConfig, length: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions of two samples, each with several documents."""
    tokens_BT = torch.randint(1, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(2))
    tokens_BT[0, [0, 5, 6, 25]] = tokens_BT[1, [30, 39]] = EOD
    return tokens_BT, torch.from_numpy(document_positions(tokens_BT.numpy(), EOD))


def bounds_of(positions_T: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*(positions_T == 0).nonzero()[:, 0].tolist(), len(positions_T)]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plain_operators", [False, True])
def test_a_packed_sample_has_the_loss_and_gradients_of_its_documents(name, plain_operators, tmp_path):
    """Logits of all families are compared with transformers in test_hf_weights.py."""
    config, module = build(name, tmp_path)
    if plain_operators:
        other = as_module(config, plain_operators=True, recompute=Recompute(interval=2))
        other.load_state_dict(module.state_dict())
        module = other
    tokens_BT, positions_BT = packed(config)
    labels_BT, weights_BT = tokens_BT.roll(-1, 1), torch.rand(tokens_BT.shape) / tokens_BT.numel()
    results = []
    for together in (True, False):
        module.zero_grad()
        if together:
            loss = module(tokens_BT, labels_BT, weights_BT, positions_BT)
        else:
            loss = sum(module(*(x[sample:sample + 1, start:stop] for x in (tokens_BT, labels_BT, weights_BT)))
                       for sample in range(2) for start, stop in bounds_of(positions_BT[sample]))
        loss.backward()
        results.append((loss.item(), torch.cat([parameter.grad.flatten() for parameter in module.parameters()])))
    (loss, gradient), (expected_loss, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradient, expected) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mpt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_at_the_end_changes_no_other_token(name, dtype, tmp_path):
    """The loader replaces padding by the token that ends a document."""
    config, module = build(name, tmp_path)
    module.to(dtype)
    tokens_BT, _ = packed(config)
    padded_BT = torch.cat((tokens_BT, torch.full((2, 9), EOD)), 1)
    with torch.no_grad():
        logits, with_padding = (module(x, positions_BT=torch.from_numpy(document_positions(x.numpy(), EOD)))
                                for x in (tokens_BT, padded_BT))
    assert with_padding.isfinite().all()
    torch.testing.assert_close(with_padding[:, :40], logits, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize(("name", "interval", "is_packed"), [
    ("gpt2", 0, False), ("gpt2", 2, True), ("llama", 2, False), ("llama", 0, True), ("bloom", 0, False),
    ("bloom", 2, True)])
def test_compiled_blocks_share_one_graph_and_keep_the_gradients(name, interval, is_packed, tmp_path):
    """The backend "aot_eager" traces without compiling. With and without documents and recomputation."""
    config, _ = build(name, tmp_path)
    tokens_BT, positions_BT = packed(config)
    micro_batches = (positions_BT, positions_BT.flip(0)) if is_packed else (None,)  # the second one: other documents
    results = []
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for compiled in (False, True):
        _, module = build(name, tmp_path)
        module.recompute = Recompute(interval=interval)
        if compiled:
            compile_blocks(module, seq_length=40, device=torch.device("cpu"), backend=counter)
        for positions in micro_batches:
            module.zero_grad()
            loss = module(tokens_BT, tokens_BT.roll(-1, 1), torch.full(tokens_BT.shape, 1 / 80), positions)
            loss.backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
            results.append((loss.item(), gradient))
    assert counter.frame_count == 1
    half = len(micro_batches)
    for (loss, gradient), (expected_loss, expected) in zip(results[half:], results[:half], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert relative_error(gradient, expected) < 1e-5
