"""Fused loss and MLP compared with torch's operators: values, gradients and saved tensors."""


import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels import activation, fused_loss
from pretrain.model.kernels.activation import activated_linear
from pretrain.model.layer_specs import as_module
from pretrain.model.operators import Operator
from tests.support.model_shapes import SHAPES, write_config
from tests.support.operators import by_torch
from tests.support.reference_loss import (
    check_error_of_fused_loss,
    linear_cross_entropy,
    token_weighted_cross_entropy,
)
from tests.support.tensors import relative_error, saved_by


def loss_inputs(dtype: torch.dtype, vocab: int = 37) -> tuple[torch.Tensor, ...]:
    """Return hidden states, head, labels, weights with a quarter of the tokens masked, and a bias of the head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (2, 9), generator=generator)
    mask = (torch.rand(2, 9, generator=generator) > 0.25).float()
    bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    return x, weight, labels, torch.rand(2, 9, generator=generator) * mask / 100, bias


def plain_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float) -> torch.Tensor:
    logits = F.linear(x, weight, bias)
    return softcap * torch.tanh(logits / softcap) if softcap else logits


@pytest.fixture
def small_chunks(monkeypatch):
    """Split 18 tokens into chunks of 5, 5, 5 and 3, and each chunk into groups of 2 rows."""
    monkeypatch.setattr(fused_loss, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(fused_loss, "CPU_LOGITS", 37 * 2 // torch.get_num_threads())


HEADS = pytest.mark.parametrize(("with_bias", "softcap"), [(False, 0.0), (True, 0.0), (True, 2.0)],
                                ids=["usual", "bias", "bias_softcap"])


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gradient_of_a_carried_parameter_is_computed_after_the_gradient_of_the_output(with_bias):
    x, weight, labels, weights, bias = loss_inputs(torch.float32)
    inputs = (x, weight, bias) if with_bias else (x, weight)
    wanted = torch.autograd.grad(linear_cross_entropy(x, weight, (labels, weights), *inputs[2:]), inputs)
    order = []
    output = fused_loss.carry(*inputs)
    output.register_hook(lambda _: order.append("output"))
    for parameter in inputs[1:]:
        parameter.register_post_accumulate_grad_hook(lambda _: order.append("parameter"))
    linear_cross_entropy(output, weight, (labels, weights), *inputs[2:]).backward()
    assert order == ["output", *["parameter"] * (len(inputs) - 1)]
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(inputs, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1024, 8192, 32768])
def test_the_error_of_the_fused_loss_does_not_grow_with_the_tokens(tokens, dtype, monkeypatch):
    """The gradients of all tokens are summed in fp32, as by torch's single product."""
    monkeypatch.setattr(fused_loss, "CPU_PRODUCT", 32 * 100)  # parts of 100 words, the last one with 57
    with by_torch(fused_loss.LOSS):
        check_error_of_fused_loss(tokens, dtype)


def test_fused_loss_is_correct_for_large_logits_and_masked_tokens():
    x, weight, labels, *_ = loss_inputs(torch.float32)
    large = linear_cross_entropy(x * 1000, weight, (labels, torch.ones(2, 9)))
    torch.testing.assert_close(large, token_weighted_cross_entropy(F.linear(x * 1000, weight),
                                                                   (labels, torch.ones(2, 9))))
    masked = linear_cross_entropy(x, weight, (labels, torch.zeros(2, 9)))
    assert masked.item() == 0
    assert all(torch.count_nonzero(grad) == 0 for grad in torch.autograd.grad(masked, (x, weight)))


def test_fused_loss_saves_two_gradients_and_no_logits():
    x, weight, labels, weights, bias = loss_inputs(torch.bfloat16, vocab=5000)
    _, saved = saved_by(linear_cross_entropy, x, weight, (labels, weights))
    assert sorted(tensor.numel() for tensor in saved) == sorted([x.numel(), weight.numel(), labels.numel(), 1])
    _, saved = saved_by(linear_cross_entropy, x, weight, (labels, weights), bias, 30.0)
    assert sorted(tensor.numel() for tensor in saved) == sorted([x.numel(), weight.numel(), 5000, labels.numel(), 1])
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "gemma2"])
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
            monkeypatch.setattr(activation, "_ActivatedLinear", None)
            monkeypatch.setattr(Operator, "choose", lambda operator, *_, plain: operator.plain if plain else None)
        loss = module(tokens[:, :-1], tokens[:, 1:], torch.full((2, 32), 1 / 64))
        loss.backward()
        seen.append((loss, {key: parameter.grad for key, parameter in module.named_parameters()}))
    (loss, gradients), (plain_loss, plain_gradients) = seen
    assert plain_loss.item() == pytest.approx(loss.item(), rel=1e-3)
    for key, gradient in gradients.items():
        assert relative_error(gradient, plain_gradients[key]) < 0.05, key
