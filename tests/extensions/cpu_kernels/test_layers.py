"""C kernels of layers on CPUs in bf16 and fp32, compared with the same operators in fp64 or fp32."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.extensions.cpu_kernels import c_functions
from pretrain.extensions.cpu_kernels.choice import in_c
from pretrain.extensions.cpu_kernels.library import has_library
from pretrain.model.kernels.activation import activated_linear
from pretrain.model.kernels.linear import linear
from pretrain.model.kernels.norm import NormSettings, norm, residual_norm, with_source
from tests.support.tensors import relative_error, saved_by

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")

IN_TORCH = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.bfloat16)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
ROUNDING = {torch.bfloat16: 1e-4, torch.float32: 1e-7}  # by which errors may differ from those of torch


@pytest.fixture
def threads():
    """Function that sets the number of threads, which is restored at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_close_to_exact(name, x, up, grad, *, rtol, atol):
    """Compare an activation in C with fp64: alone and with the gate `up`, forward and backward."""
    exact_x, exact_up = x.double().requires_grad_(), up.double().requires_grad_()
    activated = IN_TORCH[name](exact_x)
    gated = activated * exact_up
    dx, = torch.autograd.grad(activated, exact_x, grad.double(), retain_graph=True)
    wanted = [activated, dx, activated, gated, *torch.autograd.grad(gated, (exact_up, exact_x), grad.double()), gated]
    found = [c_functions.activate(name, x), *c_functions.activate_backward(name, grad.clone(), x),
             c_functions.gated(name, x, up), *c_functions.gated_backward(name, grad.clone(), x, up)]
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), exact.detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", c_functions.ACTIVATIONS_IN_C)
def test_activations_in_c_are_the_rounded_exact_values(name):
    """For all numbers in bf16 up to 1e4, alone and with a gate, forward and backward."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = every[every.isfinite() & (every.abs() < 1e4)]
    up, grad = random(len(x)), random(len(x), seed=1)
    assert_close_to_exact(name, x, up, grad, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("name", c_functions.ACTIVATIONS_IN_C_FP32)
def test_activations_in_c_are_as_exact_in_fp32_as_those_of_torch(name):
    x = torch.cat([torch.linspace(-30, 30, 40001), random(10000).float()])
    up, grad = random(len(x)).float(), random(len(x), seed=1).float()
    assert_close_to_exact(name, x, up, grad, rtol=2e-6, atol=1e-6)
    special = c_functions.activate(name, SPECIAL.float())
    assert special[0].isnan()
    assert special[1].item() == float("inf")
    assert not special[2].isfinite()


@pytest.mark.parametrize("name", c_functions.ACTIVATIONS_IN_C)
def test_activations_in_c_propagate_nan_and_infinity(name):
    ones = torch.ones_like(SPECIAL)
    for x in (c_functions.activate(name, SPECIAL), c_functions.gated(name, SPECIAL, ones),
              c_functions.gated(name, ones, SPECIAL), c_functions.activate_backward(name, SPECIAL.clone(), ones)[0],
              c_functions.gated_backward(name, SPECIAL.clone(), ones, ones)[1]):
        assert x[0].isnan()
        assert x[1].item() == float("inf")
        assert not x[2].isfinite()
    assert c_functions.activate_backward(name, ones.clone(), SPECIAL)[0][0].isnan()
    assert c_functions.gated_backward(name, ones.clone(), SPECIAL, ones)[1][0].isnan()


@pytest.mark.parametrize(("rows", "inputs", "outputs", "least_width"),
                         [(1, 7, 5, 1), (77, 33, 70, 1), (130, 70, 33, 1), (100, 48, 64, 512), (600, 96, 65, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_in_bf16_are_as_exact_as_torchs(rows, inputs, outputs, least_width, bias, monkeypatch):
    """The input and the gradient of the output are not contiguous."""
    monkeypatch.setattr(c_functions, "_LEAST_WIDTH", least_width)
    operands = (random(rows, 2, inputs).transpose(0, 1), random(outputs, inputs, seed=1),
                random(outputs, seed=2) if bias else None)
    grad = random(rows, 2, outputs, seed=3).transpose(0, 1)
    exact = results(F.linear, operands, grad, torch.float32)
    mine, theirs = (results(function, operands, grad, torch.bfloat16) for function in (linear, F.linear))
    for found, plain, wanted in zip(mine, theirs, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert relative_error(found, wanted) <= 1.1 * relative_error(plain, wanted) + 1e-4


@pytest.mark.parametrize(("rows", "inputs", "outputs"),
                         [(64, 7, 5), (130, 70, 33), (801, 300, 515), (70, 600, 64), (1600, 33, 1600)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_in_fp32_are_as_exact_as_torchs_and_do_not_depend_on_the_threads(rows, inputs, outputs, bias,
                                                                                       threads):
    """The input and the gradient of the output are not contiguous."""
    operands = (random(rows, 2, inputs).transpose(0, 1), random(outputs, inputs, seed=1),
                random(outputs, seed=2) if bias else None)
    grad = random(rows, 2, outputs, seed=3).transpose(0, 1)
    exact = results(F.linear, operands, grad, torch.float64)
    theirs = results(F.linear, operands, grad, torch.float32)
    assert in_c("linear_fp32", theirs[0], torch.float32)
    mine = []
    for count in (1, 2, 3):
        threads(count)
        mine.append(results(linear, operands, grad, torch.float32))
    for found, plain, wanted in zip(mine[0], theirs, exact, strict=True):
        assert relative_error(found, wanted) <= 1.5 * relative_error(plain, wanted) + 1e-7
    bit_equal = 3 if outputs <= c_functions._MOST_OUTPUTS else 2  # output, gradients of the input and of the weight
    for other in mine[1:]:
        assert all(map(torch.equal, mine[0][:bit_equal], other))


def test_products_in_fp32_propagate_nan_and_infinity_to_their_row_or_column():
    x, weight = random(70, 40).float(), random(45, 40, seed=1).float()
    x[3, 5], weight[44, 2] = float("nan"), float("inf")
    found, wanted = linear(x.requires_grad_(), weight, None), F.linear(x.double(), weight.double())
    assert torch.equal(found.isfinite(), wanted.isfinite())


def results(function, operands, grad, dtype):
    """Return the output and the gradients of the operands that are not None."""
    copies = [None if x is None else x.to(dtype).requires_grad_() for x in operands]
    out = function(*copies)
    return (out, *torch.autograd.grad(out, [x for x in copies if x is not None], grad.to(dtype)))


def test_a_linear_layer_computes_only_the_gradients_that_are_needed():
    x, weight, bias = random(3, 4), random(5, 4).requires_grad_(), random(5)
    linear(x, weight, bias).sum().backward()
    assert weight.grad is not None
    assert (x.grad, bias.grad) == (None, None)
    assert not linear(x, weight.detach(), bias).requires_grad


def test_a_weight_that_is_used_twice_gets_both_gradients():
    x, weight = random(6, 8), random(8, 8, seed=1).requires_grad_()
    linear(linear(x, weight, None), weight, None).sum().backward()
    exact = weight.detach().float().requires_grad_()
    F.linear(F.linear(x.float(), exact), exact).sum().backward()
    assert relative_error(weight.grad, exact.grad) < 0.01


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (512, 64), (1037, 33), (65, 515)])
def test_transposed_copies_are_exact_and_sums_do_not_depend_on_the_threads(shape, threads):
    x = random(*shape)
    exact = x.double().sum(0)
    sums = []
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(c_functions.transposed(x), x.t())
        assert torch.equal(c_functions.transposed(x.t()), x)  # not contiguous
        sums.append(c_functions.column_sum(x))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    torch.testing.assert_close(sums[0].double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("value", SPECIAL.tolist())
def test_sums_of_columns_propagate_nan_and_infinity(value):
    x = random(130, 40)
    x[70, 3] = value
    found = c_functions.column_sum(x)
    assert torch.equal(found.isfinite(), torch.arange(40) != 3)
    assert torch.equal(found[3:4], torch.tensor([value]).bfloat16()) or value != value


@pytest.mark.parametrize("name", c_functions.ACTIVATIONS_IN_C)
@pytest.mark.parametrize("gated", [False, True])
def test_the_mlp_in_bf16_is_as_exact_as_torchs(name, gated):
    operands = (random(2, 65, 96), random(2, 65, 96, seed=1) if gated else None, random(40, 96, seed=2) / 10,
                random(40, seed=3))
    grad = random(2, 65, 40, seed=4)

    def plain(up, gate, weight, bias):
        return F.linear(IN_TORCH[name](up) if gate is None else IN_TORCH[name](gate) * up, weight, bias)

    exact = results(plain, operands, grad, torch.float32)
    mine = results(lambda *arguments: activated_linear(name, *arguments), operands, grad, torch.bfloat16)
    theirs = results(plain, operands, grad, torch.bfloat16)
    for found, torchs, wanted in zip(mine, theirs, exact, strict=True):
        assert relative_error(found, wanted) <= 1.1 * relative_error(torchs, wanted) + 1e-4


NORMS = pytest.mark.parametrize(("settings", "with_bias"), [
    (NormSettings(is_rms=False, eps=1e-5), True), (NormSettings(is_rms=False, eps=1e-5), False),
    (NormSettings(is_rms=True, eps=1e-6), False), (NormSettings(is_rms=True, eps=1e-6, offset=1.0), False)],
    ids=["layernorm", "without_bias", "rmsnorm", "with_offset"])


@NORMS
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 65, 40), (2, 33, 515)])
@pytest.mark.parametrize("adds", ["nothing", "sum", "kept"])
@DTYPES
def test_norms_are_as_exact_as_torchs(shape, settings, with_bias, adds, dtype):
    """Inputs with a large mean, not contiguous; "sum": x + added, "kept": x itself is the residual connection."""
    x, added = (3 + random(shape[0], shape[2], shape[1], seed=seed).transpose(1, 2) for seed in (0, 1))
    operands = (x, added if adds == "sum" else None, random(shape[2], seed=2),
                random(shape[2], seed=3) if with_bias else None)
    grad, dtotal = random(*shape, seed=4), random(*shape, seed=5)

    def compute(x, added, weight, bias, *, plain):
        if adds == "nothing":
            return norm(x, weight, bias, settings, plain=plain)
        total, normed, _ = residual_norm(x, added, weight, bias, settings, plain=plain)
        return torch.cat((total, normed))

    grads = grad if adds == "nothing" else torch.cat((dtotal, grad))
    exact = results(lambda *each: compute(*each, plain=True), operands, grads, torch.float64)
    mine, torchs = (results(lambda *each, plain=plain: compute(*each, plain=plain), operands, grads, dtype)
                    for plain in (False, True))
    for found, plain, wanted in zip(mine, torchs, exact, strict=True):
        assert found.dtype == dtype
        assert relative_error(found, wanted) <= 1.2 * relative_error(plain, wanted) + 20 * ROUNDING[dtype]


@NORMS
def test_norms_do_not_depend_on_the_threads_and_propagate_nan_and_infinity(settings, with_bias, threads):
    x, grad, residual, weight = random(130, 40), random(130, 40, seed=1), random(130, 40, seed=2), random(40, seed=3)
    x[70, 3], x[71, 5], grad[72, 7] = SPECIAL
    bias, found = random(40, seed=4) if with_bias else None, []
    for count in (1, 2, 3):
        threads(count)
        total, normed = c_functions.norm(x, None, weight, bias, settings)
        found.append((normed, *c_functions.norm_backward(grad, total, residual, weight, settings, with_bias=with_bias)))
    for first, second, third in zip(*found, strict=True):
        if first is not None:
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(first, third, rtol=0, atol=0, equal_nan=True)
    normed, dx, dweight, dbias = found[0]
    rows = torch.arange(130)
    assert normed[70].isnan().all()
    assert torch.equal(normed.isfinite().all(1), (rows < 70) | (rows > 71))
    assert torch.equal(dx.isfinite().all(1), (rows < 70) | (rows > 72))
    assert not dweight[7].isfinite()
    assert dbias is None or not dbias[7].isfinite()


def test_norms_keep_only_their_sum_and_one_gradient_may_be_missing():
    x, added, weight = (random(*shape).requires_grad_() for shape in ((4, 8), (4, 8), (8,)))
    settings = NormSettings(is_rms=True, eps=1e-6)
    (total, *_), saved = saved_by(residual_norm, x, added, weight, None, settings)
    assert sorted(tensor.data_ptr() for tensor in saved) == sorted((total.data_ptr(), weight.data_ptr()))
    total.sum().backward()  # the norm is not used
    assert torch.equal(x.grad, torch.ones_like(x))
    x.grad = None
    residual_norm(x, None, weight, None, settings)[1].sum().backward()  # the sum is not used
    plain = x.detach().float().requires_grad_()
    F.rms_norm(plain, (8,), weight.detach().float(), 1e-6).sum().backward()
    assert relative_error(x.grad, plain.grad) < 0.01


@pytest.mark.parametrize(("with_bias", "dtype"), [(True, torch.bfloat16), (False, torch.bfloat16),
                                                  (False, torch.float32)])
@pytest.mark.parametrize("adds", [True, False])
def test_linear_layers_recompute_a_norm_and_give_the_same_bits(with_bias, adds, dtype):
    """Two layers read the norm. The first of their backward passes recomputes it, and the last one frees it."""
    shapes = (2, 33, 64), (2, 33, 64), (48, 64), (80, 64), (64,), (64,)
    x, added, *weights, scale, shift = (random(*shape, seed=seed).to(dtype).requires_grad_()
                                        for seed, shape in enumerate(shapes))
    added, shift = added.detach() if adds else None, shift if with_bias else None
    settings, found, kept = NormSettings(not with_bias, 1e-5), [], []

    def layers(recomputed):
        total, normed, source = residual_norm(x, added, scale, shift, settings, recomputed=recomputed)
        kept.append((normed, source))
        return torch.cat([total, *(linear(with_source(normed, source), weight, None) for weight in weights)], -1)

    for recomputed in (False, True):
        out = layers(recomputed)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [x, scale, *weights])])
    assert all(map(torch.equal, *found))
    assert kept[1][1].recomputation._out is None
    _, saved = saved_by(layers, True)
    assert kept[-1][0].data_ptr() not in {tensor.data_ptr() for tensor in saved}
