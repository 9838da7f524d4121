"""Custom kernels compared with torch's operators: values, gradients and saved tensors."""


import pytest
import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch._subclasses.fake_tensor import FakeTensorMode

from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels import activation, cpu_attention, cpu_kernels, fused_loss
from pretrain.model.kernels.activation import activate, activate_backward, activated_linear
from pretrain.model.kernels.cpu_attention import Scores, _CausalAttention, causal_attention
from pretrain.model.layer_specs import as_module, compile_blocks
from pretrain.model.loss import linear_cross_entropy
from tests.support.model_shapes import SHAPES, write_config
from tests.support.reference_loss import token_weighted_cross_entropy


def heads(batch: int, heads: int, kv_heads: int, length: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k and v with the memory layout of the projection's output, and a gradient of the attention's output."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(batch, length, n, size, generator=generator).to(dtype).transpose(1, 2) for n in sizes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def relative_error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    return ((mine.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_gradients_of_attention_equal_numerical_derivatives(kv_heads, monkeypatch):
    monkeypatch.setattr(cpu_attention, "_ROWS", 3)  # 7 positions: blocks of 3, 3 and 1
    monkeypatch.setattr(cpu_attention, "_SCORES_PER_THREAD", 1)  # one sample at a time
    q, k, v, _ = heads(2, 4, kv_heads, 7, 4, torch.float64)
    torch.testing.assert_close(_CausalAttention.apply(q, k, v, Scores(0.5)), plain_attention(q, k, v))
    assert torch.autograd.gradcheck(lambda *inputs: _CausalAttention.apply(*inputs, Scores(0.5)), (q, k, v))


@pytest.mark.parametrize(("length", "kv_heads"), [(40, 4), (300, 4), (300, 1)])
def test_attention_in_bf16_is_as_precise_as_that_of_torch(length, kv_heads):
    *inputs, grad = heads(3, 4, kv_heads, length, 64, torch.bfloat16)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = plain_attention(*exact_inputs)
    mine, theirs = causal_attention(*inputs), plain_attention(*inputs)
    assert relative_error(mine, exact) < 1.5 * relative_error(theirs, exact) + 1e-3
    wanted = torch.autograd.grad(exact, exact_inputs, grad.double())
    for mine_grad, their_grad, exact_grad in zip(torch.autograd.grad(mine, inputs, grad),
                                                 torch.autograd.grad(theirs, inputs, grad), wanted, strict=True):
        assert relative_error(mine_grad, exact_grad) < 2 * relative_error(their_grad, exact_grad) + 1e-3


def saved_by(compute, *arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return compute(*arguments), saved


def test_attention_saves_only_its_inputs():
    q, k, v, _ = heads(2, 4, 2, 64, 16, torch.bfloat16)
    _, saved = saved_by(causal_attention, q, k, v)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v)}


def test_attention_with_dropout_or_in_fp32_uses_torchs_operator():
    for dtype, dropout in ((torch.float32, 0.0), (torch.bfloat16, 0.5)):
        q, k, v, _ = heads(2, 4, 4, 32, 16, dtype)
        torch.manual_seed(1)
        mine = causal_attention(q, k, v, dropout=dropout)
        torch.manual_seed(1)
        assert torch.equal(mine, F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout))


def loss_inputs(dtype: torch.dtype, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, head, labels and weights, with a quarter of the tokens masked."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (2, 9), generator=generator)
    mask = (torch.rand(2, 9, generator=generator) > 0.25).float()
    return x, weight, labels, torch.rand(2, 9, generator=generator) * mask / 100


@pytest.fixture
def small_chunks(monkeypatch):
    """Split 18 tokens into chunks of 5, 5, 5 and 3, and each chunk into groups of 2 rows."""
    monkeypatch.setattr(fused_loss, "_TOKENS", 5)
    monkeypatch.setattr(fused_loss, "_CPU_ELEMENTS", 37 * 2 // torch.get_num_threads())


@pytest.mark.usefixtures("small_chunks")
def test_gradients_of_the_fused_loss_equal_numerical_derivatives():
    x, weight, labels, weights = loss_inputs(torch.float64)
    loss = linear_cross_entropy(x, weight, (labels, weights))
    torch.testing.assert_close(loss, (F.cross_entropy(
        F.linear(x, weight).flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()).sum())
    assert torch.autograd.gradcheck(lambda a, b: linear_cross_entropy(a, b, (labels, weights.double())), (x, weight))


def test_the_gradient_of_a_carried_weight_is_computed_after_the_gradient_of_the_output():
    x, weight, labels, weights = loss_inputs(torch.float32)
    wanted = torch.autograd.grad(linear_cross_entropy(x, weight, (labels, weights)), (x, weight))
    order = []
    output = fused_loss.carry(x, weight)
    output.register_hook(lambda _: order.append("output"))
    weight.register_post_accumulate_grad_hook(lambda _: order.append("weight"))
    linear_cross_entropy(output, weight, (labels, weights)).backward()
    assert order == ["output", "weight"]
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "scale", "tolerance"), [
    (torch.float32, 1.0, 1e-6), (torch.bfloat16, 1.0, 2e-2), (torch.float16, 65536.0, 3e-3)])
def test_fused_loss_equals_the_loss_of_the_logits(dtype, scale, tolerance):
    """fp16 uses a loss scale, because gradients of this size would otherwise be 0."""
    x, weight, labels, weights = loss_inputs(dtype)
    mine = linear_cross_entropy(x, weight, (labels, weights / 1000))
    plain = token_weighted_cross_entropy(F.linear(x.float(), weight.float()), (labels, weights / 1000))
    assert mine.dtype == torch.float32
    assert mine.item() == pytest.approx(plain.item(), rel=max(tolerance / 4, 1e-6))
    for mine_grad, grad in zip(torch.autograd.grad(mine * scale, (x, weight)),
                               torch.autograd.grad(plain * scale, (x, weight)), strict=True):
        assert mine_grad.dtype == dtype
        assert relative_error(mine_grad, grad) < tolerance


def test_fused_loss_is_correct_for_large_logits_and_masked_tokens():
    x, weight, labels, _ = loss_inputs(torch.float32)
    large = linear_cross_entropy(x * 1000, weight, (labels, torch.ones(2, 9)))
    torch.testing.assert_close(large, token_weighted_cross_entropy(F.linear(x * 1000, weight),
                                                                   (labels, torch.ones(2, 9))))
    masked = linear_cross_entropy(x, weight, (labels, torch.zeros(2, 9)))
    assert masked.item() == 0
    assert all(torch.count_nonzero(grad) == 0 for grad in torch.autograd.grad(masked, (x, weight)))


def test_fused_loss_saves_two_gradients_and_no_logits():
    x, weight, labels, weights = loss_inputs(torch.bfloat16, vocab=5000)
    _, saved = saved_by(linear_cross_entropy, x, weight, (labels, weights))
    assert sorted(tensor.numel() for tensor in saved) == sorted([x.numel(), weight.numel(), labels.numel(), 1])
    with torch.no_grad():
        _, saved = saved_by(linear_cross_entropy, x, weight, (labels, weights))
    assert saved == []


def plain_mlp(name: str, up: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor,
              bias: torch.Tensor | None) -> torch.Tensor:
    function = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
                "relu": F.relu, "relu2": lambda x: F.relu(x) ** 2}[name]
    return F.linear(function(up) if gate is None else function(gate) * up, weight, bias)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_gradients_of_an_activated_linear_equal_numerical_derivatives(name, gated):
    generator = torch.Generator().manual_seed(0)
    up, gate, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
                              for shape in ((2, 3, 6), (2, 3, 6), (4, 6), (4,)))
    arguments = (up, gate if gated else None, weight, None if gated else bias)
    torch.testing.assert_close(activated_linear(name, *arguments), plain_mlp(name, *arguments))
    assert torch.autograd.gradcheck(lambda *a: activated_linear(name, *a), arguments)


def test_mlp_saves_only_its_inputs():
    up, gate, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 6), (2, 3, 6), (4, 6)))
    _, saved = saved_by(activated_linear, "silu", up, gate, weight, None)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (up, gate, weight)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_plain_operators_use_torchs_operators(name, tmp_path, monkeypatch):
    """No custom kernel is called; loss and gradients agree with the custom kernels up to bf16 rounding."""
    config = load_model_config(write_config(tmp_path, SHAPES[name]))
    tokens = torch.randint(0, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    seen = []
    for plain in (False, True):
        module = as_module(config, plain_operators=plain)
        initialize_parameters(module, config, seed=1)
        module.bfloat16()
        if plain:
            monkeypatch.setattr(cpu_attention, "_CausalAttention", None)
            monkeypatch.setattr(activation, "_ActivatedLinear", None)
            monkeypatch.setattr(cpu_kernels, "_library", None)
        loss = module(tokens[:, :-1], tokens[:, 1:], torch.full((2, 32), 1 / 64))
        loss.backward()
        seen.append((loss, {key: parameter.grad for key, parameter in module.named_parameters()}))
    (loss, gradients), (plain_loss, plain_gradients) = seen
    assert plain_loss.item() == pytest.approx(loss.item(), rel=1e-3)
    for key, gradient in gradients.items():
        assert relative_error(gradient, plain_gradients[key]) < 0.05, key


@pytest.mark.skipif(cpu_kernels._library() is None, reason="no C compiler")
def test_gelu_in_bf16_is_the_rounded_exact_value():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = every[every.isfinite() & (every.abs() < 1e4)]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = F.gelu(x.double(), approximate="tanh")
    exact_grad = torch.ops.aten.gelu_backward(grad.double(), x.double(), approximate="tanh")
    for mine, wanted in ((activate("gelu_tanh", x), exact), (activate_backward("gelu_tanh", grad, x), exact_grad)):
        torch.testing.assert_close(mine.double(), wanted, rtol=2**-8, atol=1e-5)
    special = torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16)
    assert activate("gelu_tanh", special).isnan().tolist() == [True, False]
    assert activate_backward("gelu_tanh", special[:1], torch.ones(1).bfloat16()).isnan().all()


def test_fake_tensors_are_not_passed_to_c_code():
    with FakeTensorMode():
        up, weight = torch.randn(2, 3, 6, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, 6).bfloat16()
        assert not cpu_kernels.has_kernels(up)
        activated_linear("gelu_tanh", up, None, weight, None).sum().backward()
        assert up.grad.shape == up.shape


def test_without_a_compiler_torchs_operators_are_used(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_library", lambda: None)
    x = torch.randn(100).bfloat16()
    assert torch.equal(activate("gelu_tanh", x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_blocks_share_one_graph_and_keep_the_gradients(name, interval, tmp_path):
    """The backend "aot_eager" traces without compiling. Forward and backward pass, with and without recomputation."""
    config = load_model_config(write_config(tmp_path, SHAPES[name]))
    tokens = torch.randint(0, config.vocab_size, (2, 17))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seen = []
    for compiled in (False, True):
        module = as_module(config, activation_checkpoint_interval=interval)
        initialize_parameters(module, config, seed=1)
        if compiled:
            compile_blocks(module, seq_length=16, device=torch.device("cpu"), backend="aot_eager")
        module(tokens[:, :-1], tokens[:, 1:], torch.full((2, 16), 1 / 32)).backward()
        seen.append({key: parameter.grad for key, parameter in module.named_parameters()})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert list(seen[0]) == list(seen[1])
    for key, gradient in seen[0].items():
        torch.testing.assert_close(seen[1][key], gradient)
