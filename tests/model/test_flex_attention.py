"""The fused attention of CUDA for documents, windows, ALiBi and soft-capping, compared with dense masks.

Its kernel needs a GPU and triton. Here torch's own reference of flex_attention runs instead, which computes all scores
with the same functions and the same table of blocks. tests/gpu compares the kernel itself.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels import flex_attention, torch_attention
from pretrain.model.kernels.documents import Documents, first_keys
from pretrain.model.kernels.flex_attention import (
    BLOCK,
    flex_causal_attention,
    make_block_mask,
    why_not_flex,
)
from pretrain.model.kernels.torch_attention import alibi_slopes, torch_causal_attention
from pretrain.model.layer_specs import as_module, compile_blocks
from tests.support.model_shapes import SHAPES, write_config
from tests.support.operators import by_torch
from tests.support.tensors import relative_error

LENGTH = 3 * BLOCK


@pytest.fixture
def on_cpu(monkeypatch):
    """Let torch's reference of flex_attention run on the CPU, also where a gradient is needed. Returns the calls."""
    calls = []
    torch._dynamo.reset()
    operator = torch.compile(flex_attention._operator(), backend="aot_eager", dynamic=False)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "_compiled_operator",
                        lambda: lambda *tensors, **how: calls.append(how) or operator(*tensors, **how))
    return calls


def positions(*lengths: int) -> torch.Tensor:
    """Return the positions of documents of these lengths in one sample."""
    return torch.cat([torch.arange(length) for length in lengths])


def packed() -> torch.Tensor:
    """Two samples: documents that begin inside blocks and at their limits, and one of a single token."""
    return torch.stack([positions(100, 28, 1, 155, 100), positions(BLOCK, 2 * BLOCK)])


@pytest.mark.parametrize("window", [0, 1, 50, BLOCK, BLOCK + 1, 300])
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_table_of_blocks_has_each_visible_key(window, is_packed):
    """A block that is missing would lose keys; one that is wrongly complete would add some."""
    positions_BT = packed() if is_packed else torch.arange(LENGTH)[None]
    mask = make_block_mask(first_keys(positions_BT, window))
    batch = len(positions_BT)
    visible = torch_flex.create_mask(mask.mask_mod, batch, 1, LENGTH, LENGTH, device="cpu")
    tokens = torch.arange(LENGTH)
    expected = torch.stack([(tokens <= tokens[:, None]) & (tokens >= (tokens - p)[:, None]) for p in positions_BT])
    if window:
        expected &= tokens > tokens[:, None] - window
    assert torch.equal(visible[:, 0], expected)
    blocks = expected.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))  # [B, N, BLOCK, N, BLOCK]
    some, every = blocks.any(4).any(2), blocks.all(4).all(2)
    listed = {kind: torch.zeros_like(some) for kind in ("kv", "full_kv")}
    for kind, table in listed.items():
        counts, indices = getattr(mask, f"{kind}_num_blocks")[:, 0], getattr(mask, f"{kind}_indices")[:, 0]
        for b in range(batch):
            for q in range(table.shape[1]):
                table[b, q, indices[b, q, : counts[b, q]].long()] = True
    assert torch.equal(listed["full_kv"], every)
    assert torch.equal(listed["kv"], some & ~every)


@pytest.mark.parametrize(("window", "softcap", "alibi", "is_packed", "kv_heads"), [
    (0, 0.0, False, True, 4), (50, 0.0, False, False, 2), (0, 0.0, True, False, 4), (0, 5.0, False, False, 2),
    (200, 5.0, True, True, 2)])
def test_output_and_gradients_equal_those_with_dense_masks(window, softcap, alibi, is_packed, kv_heads, on_cpu):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, 16), *[(2, kv_heads, LENGTH, 16)] * 2]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    slopes = alibi_slopes(4) if alibi else None
    arguments = {"window": window, "softcap": softcap, "alibi_slopes": slopes, "scale": 0.3}
    seen = []
    for operator in (torch_causal_attention, flex_causal_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = operator(*leaves, documents=Documents(packed()) if is_packed else None, **arguments)
        seen.append([out, *torch.autograd.grad(out, leaves, grad)])
    for found, expected in zip(*reversed(seen), strict=True):
        assert relative_error(found, expected) < 1e-6  # the slopes are fp32


def test_each_reason_against_the_kernel(monkeypatch):
    monkeypatch.setattr(flex_attention, "has_triton", lambda: True)
    q = torch.empty(1, 2, LENGTH, 64, dtype=torch.bfloat16)
    assert why_not_flex(q, dropout=0.0, on_cuda=True) == ""
    assert why_not_flex(q, dropout=0.0, on_cuda=False) == "the device is not CUDA"
    assert why_not_flex(q, dropout=0.1, on_cuda=True) == "attention dropout"
    assert "fp32 instead of bf16" in why_not_flex(q.float(), dropout=0.0, on_cuda=True)
    assert "383 tokens" in why_not_flex(q[:, :, 1:], dropout=0.0, on_cuda=True)
    assert "heads of 63 elements" in why_not_flex(q[..., 1:], dropout=0.0, on_cuda=True)
    monkeypatch.setattr(flex_attention, "has_triton", lambda: False)
    assert "triton is missing" in why_not_flex(q, dropout=0.0, on_cuda=True)


@pytest.mark.parametrize(("name", "compiled"), [
    ("gemma2", True), *(pytest.param(*values, marks=pytest.mark.slow) for values in (
        ("llama", True), ("gemma2", False), ("mpt", True)))])
def test_models_use_the_kernel_and_keep_their_gradients(name, compiled, on_cpu, monkeypatch, tmp_path):
    """With --compile_blocks the kernel is part of the graph of a block, also for other documents."""
    config = load_model_config(write_config(tmp_path, SHAPES[name] | {"max_position_embeddings": LENGTH}
                                            if name != "mpt" else SHAPES[name] | {"max_seq_len": LENGTH}))
    tokens_BT = torch.randint(0, config.vocab_size, (2, LENGTH))
    seen = []
    counter = CompileCounterWithBackend("aot_eager")
    for fused in (False, True):
        monkeypatch.setattr(torch_attention, "why_not_flex", lambda *q, fused=fused, **how: "" if fused else "a test")
        module = as_module(config, plain_operators=not fused)
        initialize_parameters(module, config, seed=1)
        if fused and compiled:
            compile_blocks(module, seq_length=LENGTH, device=torch.device("cpu"), backend=counter)
        for positions_BT in (packed(), packed().flip(0)):
            module.zero_grad()
            with by_torch(torch_attention.ATTENTION):  # as on CUDA
                loss = module(tokens_BT, tokens_BT.roll(-1, 1), torch.full(tokens_BT.shape, 1 / 768), positions_BT)
            loss.backward()
            seen.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
    for found, expected in zip(seen[2:], seen[:2], strict=True):
        assert relative_error(found, expected) < 1e-4
    assert bool(on_cpu) != compiled
    if compiled:
        windows = len({config.window(index) for index in range(config.num_layers)})
        # torch 2.6 compiles Gemma's block once more
        assert counter.frame_count in (windows, windows + (torch.__version__ < "2.7"))
