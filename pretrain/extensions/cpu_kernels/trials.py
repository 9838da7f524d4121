"""Trials of the C functions: the same work in C and with torch's operators, compared in result and in time.

A compiler may not know the CPU. Its code may then be slow, or even wrong.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pretrain.extensions.cpu_kernels import c_functions
from pretrain.extensions.cpu_kernels.attention_in_c import AttentionSettings, attention, attention_fp32, instructions
from pretrain.model.kernels.norm import NormSettings

_CHECKED_ROWS = 37  # odd, so that loops over vectors have a remainder
_TIMED_ROWS = 256
_REPETITIONS = (5, 25)  # at least, and at most
_TIMED_S = 0.03  # after so much CPU time, only the least number of repetitions is measured
_TOLERANCE = 0.03  # fraction of the largest element: wrong code differs by more, and bf16 by less

Operands = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Trial:
    """One operator of a family, in C and with torch. Both functions get copies of the same operands."""

    family: str  # one of choice.FAMILIES
    operands: Callable[[int, torch.Generator], Operands]  # operands for a number of rows
    in_c: Callable[..., Any]  # both return a tensor or a tuple of tensors
    in_torch: Callable[..., Any]


def _rows(count: int, *columns: int,
          dtype: torch.dtype = torch.bfloat16) -> Callable[[int, torch.Generator], Operands]:
    """Return a function that makes `count` matrices."""
    def make(rows: int, generator: torch.Generator) -> Operands:
        return tuple(torch.randn((rows, *columns), generator=generator, device="cpu").to(dtype) for _ in range(count))
    return make


def _logits(rows: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Operands:
    logits = 3 * torch.randn((rows, 515), generator=generator, device="cpu")
    return logits.to(dtype), torch.randint(515, (rows,), generator=generator, device="cpu")


def _losses_in_c(logits: torch.Tensor, labels: torch.Tensor) -> Operands:
    return *c_functions.cross_entropy_(logits, labels, with_grad=True, label_smoothing=0.0, z_loss=0.0), logits


def _losses_in_torch(logits: torch.Tensor, labels: torch.Tensor) -> Operands:
    p = torch.softmax(logits, dim=1, dtype=torch.float32)
    log_z = torch.logsumexp(logits.float(), 1)
    at_label = logits.gather(1, labels[:, None])
    gradient = p.scatter_add_(1, labels[:, None], torch.full_like(at_label, -1, dtype=torch.float32))
    return log_z - at_label[:, 0], log_z, gradient.to(logits.dtype)


def _activation_trials(name: str, approximate: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Trial, ...]:
    """Return trials of a variant of GELU, alone and with a gate, forward and backward."""
    rows = partial(_rows, dtype=dtype)
    gelu = partial(torch.nn.functional.gelu, approximate=approximate)
    slope = partial(torch.ops.aten.gelu_backward, approximate=approximate)
    return (
        Trial("activation", rows(1, 515), partial(c_functions.activate, name), gelu),
        Trial("activation", rows(2, 515), partial(c_functions.activate_backward, name),
              lambda grad, x: (slope(grad, x), gelu(x))),
        Trial("activation", rows(2, 515), partial(c_functions.gated, name), lambda gate, up: gelu(gate) * up),
        Trial("activation", rows(3, 515), partial(c_functions.gated_backward, name),
              lambda grad, gate, up: (grad * gelu(gate), slope(grad * up, gate), gelu(gate) * up)))


def _layer(rows: int, generator: torch.Generator) -> Operands:
    """Return the input of a linear layer, the gradient of its output, its weight and its bias.

    The time is measured with the rows of a micro-batch, 2,048; the check has few rows, because each process makes it.
    """
    tokens = rows**2 // 32
    return (*_rows(1, 512)(tokens, generator), *_rows(1, 1024)(tokens, generator),
            *_rows(1, 512)(1024, generator), *_rows(1, 1024)(1, generator))


def _layer_in_c(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    return (c_functions.linear(x, weight, bias[0]), c_functions.weight_gradient(x, grad),
            c_functions.weight_gradient(grad, x), c_functions.column_sum(grad))


def _layer_in_torch(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    return torch.nn.functional.linear(x, weight, bias[0]), grad.t() @ x, x.t() @ grad, grad.sum(0)


def _layer_fp32(rows: int, generator: torch.Generator) -> Operands:
    """Return the same operands in fp32 for a small layer. The time is measured with 768 tokens."""
    make = partial(_rows, dtype=torch.float32)
    return (*make(1, 256)(3 * rows, generator), *make(1, 515)(3 * rows, generator), *make(1, 256)(515, generator),
            *make(1, 515)(1, generator))


def _layer_in_c_fp32(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    return (c_functions.linear(x, weight, bias[0]), c_functions.input_gradient_fp32(grad, weight),
            c_functions.weight_gradient(x, grad))


def _layer_in_torch_fp32(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    return torch.nn.functional.linear(x, weight, bias[0]), grad @ weight, grad.t() @ x


def _projections(rows: int, generator: torch.Generator) -> Operands:
    """Return queries, keys and values with 4 query heads and 2 key/value heads of 64, and a gradient.

    Each thread has a key/value head.
    """
    samples = max(2, -(-torch.get_num_threads() // 2))
    return tuple(torch.randn((samples, rows, heads, 64), generator=generator, device="cpu").bfloat16()
                 for heads in (8, 4))


def _attention_in_c(qkv_BTGE: torch.Tensor, grad_BTHE: torch.Tensor) -> Operands:
    if not instructions():
        return _attention_in_torch(qkv_BTGE, grad_BTHE)
    return _with_gradient(lambda qkv: attention((qkv,), AttentionSettings(num_heads=4)), qkv_BTGE, grad_BTHE)


def _projections_fp32(rows: int, generator: torch.Generator) -> Operands:
    return tuple(x.float() for x in _projections(rows, generator))


def _attention_in_fp32(qkv_BTGE: torch.Tensor, grad_BTHE: torch.Tensor) -> Operands:
    return _with_gradient(lambda qkv: attention_fp32(qkv, 4), qkv_BTGE, grad_BTHE)


def _attention_in_torch(qkv_BTGE: torch.Tensor, grad_BTHE: torch.Tensor) -> Operands:
    def attend(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv.split((4, 2, 2), dim=2))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    return _with_gradient(attend, qkv_BTGE, grad_BTHE)


def _with_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> Operands:
    """Return the function's value and the gradient of its input.

    The first trials may be made in a context that records saved tensors, such as that of a checkpoint.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        value = function(x.requires_grad_())
        # not torch.autograd.grad(value, x, grad), which imports sympy to compare the shapes (torch 2.13), 0.4 s
        return value.detach(), *torch.autograd.grad((value * grad).sum(), x)


def _norm(rows: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Return input, added residual, gradients of norm and sum, weight and bias."""
    return _rows(4, 515, dtype=dtype)(rows, generator) + _rows(2, 515, dtype=dtype)(1, generator)


def _norm_in_c(x: torch.Tensor, added: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
               bias: torch.Tensor) -> tuple[Any, ...]:
    settings = NormSettings(is_rms=False, eps=1e-5)
    total, normed = c_functions.norm(x, added, weight[0], bias[0], settings)
    return total, normed, *c_functions.norm_backward(grad, total, residual, weight[0], settings, with_bias=True)


def _norm_in_torch(x: torch.Tensor, added: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor,
                   weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    total, shape = x + added, list(x.shape[1:])
    normed, mean, scale = torch.native_layer_norm(total, shape, weight[0], bias[0], 1e-5)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(grad, total, shape, mean, scale, weight[0], bias[0],
                                                                   [True, True, True])
    return total, normed, dx + residual, dweight, dbias


def _rms_norm_in_c(x: torch.Tensor, added: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor,
                   weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    settings = NormSettings(is_rms=True, eps=1e-5)
    total, normed = c_functions.norm(x, added, weight[0], None, settings)
    dx, dweight, _ = c_functions.norm_backward(grad, total, residual, weight[0], settings, with_bias=False)
    return total, normed, dx, dweight


def _rms_norm_in_torch(x: torch.Tensor, added: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor,
                       weight: torch.Tensor, bias: torch.Tensor) -> Operands:
    total = x + added
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        leaves = total.detach().requires_grad_(), weight[0].clone().requires_grad_()
        normed = torch.nn.functional.rms_norm(leaves[0], x.shape[1:], leaves[1], 1e-5)
        dx, dweight = torch.autograd.grad((normed * grad).sum(), leaves)
    return total, normed.detach(), dx + residual, dweight


def _gradients_in_c(x: torch.Tensor) -> Operands:
    not_finite = torch.stack([c_functions.has_not_finite(x), c_functions.has_not_finite(x / 0)])
    scaled = c_functions.scale_to_float_(torch.empty(x.shape), x, 0.3)
    norms = c_functions.euclidean_norm(x), c_functions.euclidean_norm(scaled)
    return not_finite.float(), norms[0], scaled, norms[1], c_functions.multiply_(x, 3.0)


def _gradients_in_torch(x: torch.Tensor) -> Operands:
    not_finite = torch.stack([torch.isfinite(y.amax() + y.amin()).logical_not() for y in (x, x / 0)])
    norm, scaled = torch.linalg.vector_norm(x.double()), x.float().mul_(0.3)
    return not_finite.float(), norm, scaled, 0.3 * norm, x.mul_(3.0)


TRIALS = (
    *_activation_trials("gelu_tanh", "tanh"),
    *_activation_trials("gelu", "none"),
    *_activation_trials("gelu_tanh", "tanh", torch.float32),
    *(Trial("activation", _rows(2, 515, dtype=dtype), partial(c_functions.activate_backward, "silu"),
            lambda grad, x: (torch.ops.aten.silu_backward(grad, x), torch.nn.functional.silu(x)))
      for dtype in (torch.bfloat16, torch.float32)),
    Trial("linear", _layer, _layer_in_c, _layer_in_torch),
    Trial("linear_fp32", _layer_fp32, _layer_in_c_fp32, _layer_in_torch_fp32),
    Trial("norm", _norm, _norm_in_c, _norm_in_torch),
    Trial("norm", partial(_norm, dtype=torch.float32), _rms_norm_in_c, _rms_norm_in_torch),
    Trial("optimizer", _rows(1, 515), _gradients_in_c, _gradients_in_torch),
    *(Trial("loss", partial(_logits, dtype=dtype), _losses_in_c, _losses_in_torch)
      for dtype in (torch.bfloat16, torch.float32)),
    Trial("attention", _projections, _attention_in_c, _attention_in_torch),
    Trial("attention_fp32", _projections_fp32, _attention_in_fp32, _attention_in_torch),
)


@torch.no_grad()
def is_right(trial: Trial) -> bool:
    """Return whether the C function gives torch's results, up to the rounding of bf16. Takes a millisecond."""
    operands = _operands(trial, _CHECKED_ROWS)
    mine, wanted = (_results(function, operands) for function in (trial.in_c, trial.in_torch))
    return len(mine) == len(wanted) and all(map(_is_close, mine, wanted))


@torch.no_grad()
def times_ms(trial: Trial) -> tuple[float, float]:
    """Return the shortest times of the C function and of torch's operators, measured in turn.

    They are CPU times of this thread, to which other programs on the machine add little: in wall-clock time, chance
    would decide on a busy machine. With several threads, each variant also waits for its other threads in this one.
    """
    operands, shortest, spent, repetition = _operands(trial, _TIMED_ROWS), [float("inf"), float("inf")], 0.0, 0
    # the first call may allocate memory or start threads
    while repetition <= _REPETITIONS[0] or (repetition <= _REPETITIONS[1] and spent < _TIMED_S):
        for index, function in enumerate((trial.in_c, trial.in_torch)):
            copies = tuple(operand.clone() for operand in operands)
            start = time.thread_time()
            function(*copies)
            seconds = time.thread_time() - start
            shortest[index], spent = min(shortest[index], 1e3 * seconds), spent + seconds
        repetition += 1
    return shortest[0], shortest[1]


def _operands(trial: Trial, rows: int) -> Operands:
    # not the generator of the run, whose state decides the dropout masks
    return trial.operands(rows, torch.Generator(device="cpu").manual_seed(0))


def _results(function: Callable[..., Any], operands: Operands) -> Operands:
    result = function(*(operand.clone() for operand in operands))
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _is_close(mine: torch.Tensor, wanted: torch.Tensor) -> bool:
    scale = wanted.float().abs().max().item()
    return mine.shape == wanted.shape and torch.allclose(mine.float(), wanted.float(), rtol=0, atol=_TOLERANCE * scale)
