"""Document attention: packed documents compute what each document computes alone."""

import itertools
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from pretrain.data.loader import document_positions
from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels.torch_attention import AttentionSettings, alibi_slopes, torch_causal_attention
from pretrain.model.layer_specs import CausalLM, as_module, compile_blocks
from pretrain.model.recompute import Recompute
from tests.support.model_shapes import SHAPES, write_config
from tests.support.reference_attention import (
    alone,
    as_arguments,
    documents_of,
    eager_attention,
    heads,
    output_and_gradients,
)
from tests.support.tensors import relative_error

EOD = 0
NAMES = [name for name in SHAPES if name != "llama_dynamic_rope"]  # longer than the model's positions: rejected


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["", "alibi"])
@pytest.mark.parametrize("lengths", [((11,), (1, 10)), ((3, 4, 4), (9, 2)), ((1,) * 11, (2, 1, 5, 3))], ids=str)
def test_torchs_operators_equal_each_document_alone(slopes, softcap, lengths):
    for window, kv_heads in itertools.product((0, 1, 2, 3, 4, 6), (1, 2, 4)):
        *inputs, grad = heads(2, 4, kv_heads, 11, 4, torch.float64)
        settings = AttentionSettings(4, kv_heads, 0.3, window, softcap, slopes)
        documents = documents_of(*lengths)
        expected = output_and_gradients(lambda *x, s=settings, d=documents: alone(eager_attention, x, d, s), inputs,
                                        grad)
        seen = output_and_gradients(torch_causal_attention, inputs, grad, **as_arguments(settings), documents=documents)
        torch.testing.assert_close(seen, expected, msg=lambda m, at=(window, kv_heads): f"{at}: {m}")


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
