"""The C functions for CPUs as functions of tensors: activations, linear layers, norms, cross-entropy, gradients.

Attention is in attention_in_c.py. In bf16, linear layers use oneDNN's products in the forms that it computes fast, with
transposed copies and sums of columns in C; in fp32 the products are in C (products.c). The other functions take tensors
in bf16 or fp32, and those for gradients contiguous ones.

Shapes: N rows (tokens), I inputs, O outputs; C tokens, V words of the vocabulary.
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.extensions.cpu_kernels.library import call
from pretrain.model.kernels.norm import NormSettings

ACTIVATIONS_IN_C = ("gelu", "gelu_tanh", "silu")  # in bf16; the others are as fast in torch
ACTIVATIONS_IN_C_FP32 = ("gelu_tanh", "silu")
_LEAST_WIDTH = 512  # narrower layers gain nothing from a transposed copy: measured on an AMX core
_MOST_OUTPUTS = 1536  # in a weight gradient in fp32 in C; the rows of more are too far apart for the caches
_BLOCK_ROWS = 64  # rows that one thread adds; columns.h repeats it
_BLOCK_ELEMENTS = 16384  # elements of a partial sum, as in gradients.c
_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_TYPE = {torch.bfloat16: "", torch.float32: "_fp32"}  # in the names of functions for layers


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of each element."""
    x = x.contiguous()
    out = torch.empty_like(x)
    call(f"{name}{_TYPE[x.dtype]}", x, out, x.numel())
    return out


def activate_backward(name: str, grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x, which is written to `grad` if that is contiguous, and the activation of x."""
    grad, x = grad.contiguous(), x.contiguous()
    activated = torch.empty_like(x)
    call(f"{name}{_TYPE[x.dtype]}_backward", grad, x, activated, x.numel())
    return grad, activated


def gated(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    call(f"{name}{_TYPE[up.dtype]}_gated", gate, up, out, up.numel())
    return out


def gated_backward(name: str, grad: torch.Tensor, gate: torch.Tensor,
                   up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of up and gate, and activation(gate) * up. The first is written to a contiguous `grad`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    inner, dgate = torch.empty_like(up), torch.empty_like(up)
    call(f"{name}{_TYPE[up.dtype]}_gated_backward", grad, gate, up, inner, dgate, up.numel())
    return grad, dgate, inner


def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight^T + bias. In bf16, uses `inner_product`; torch's if a bias has another dtype."""
    if bias_O is not None and bias_O.dtype != x.dtype:
        return F.linear(x, weight_OI, bias_O)
    if x.dtype == torch.float32:
        out = _product_fp32(x.flatten(0, -2), weight_OI, bias_O, weight_OI.shape[0], b_transposed=True)
        return out.view(*x.shape[:-1], -1)
    return inner_product(x, weight_OI, bias_O)


def inner_product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight^T + bias as oneDNN's inner product. torch's operator adds a bias in another pass."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return out


def input_gradient_fp32(grad_NO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return grad @ weight, [N, I]."""
    return _product_fp32(grad_NO, weight_OI, None, weight_OI.shape[1])


def weight_gradient(x_NI: torch.Tensor, grad_NO: torch.Tensor) -> torch.Tensor:
    """Return grad^T @ x, [O, I].

    In bf16, the smaller one is transposed first: oneDNN is half as fast if it has to do so.
    """
    if x_NI.dtype == torch.float32:
        if grad_NO.shape[1] > _MOST_OUTPUTS:
            return grad_NO.t() @ x_NI
        return _product_fp32(grad_NO, x_NI, None, x_NI.shape[1], a_transposed=True)
    if min(x_NI.shape[1], grad_NO.shape[1]) < _LEAST_WIDTH:
        return grad_NO.t() @ x_NI
    if x_NI.shape[1] <= grad_NO.shape[1]:
        return transposed(transposed(x_NI) @ grad_NO)
    return transposed(grad_NO) @ x_NI


def _product_fp32(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, columns: int, *,
                  a_transposed: bool = False, b_transposed: bool = False) -> torch.Tensor:
    """Return a @ b + bias for matrices in fp32, each of them perhaps transposed."""
    a, b, bias = a.contiguous(), b.contiguous(), None if bias is None else bias.contiguous()
    depth, rows = a.shape if a_transposed else a.shape[::-1]
    out = a.new_empty(rows, columns)
    call("product_fp32", a, b, bias, out, rows, depth, columns, int(a_transposed), int(b_transposed))
    return out


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the transposed matrix, at about the speed of a plain copy."""
    x = x.contiguous()
    out = x.new_empty(x.shape[::-1])
    call("transpose", x, out, *x.shape)
    return out


def column_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows, added in fp32. The result does not depend on the number of threads."""
    x = x.contiguous()
    out = x.new_empty(x.shape[1])
    call("column_sum", x, partial_sums(*x.shape), out, *x.shape)
    return out


def partial_sums(rows: int, columns: int, count: int = 1) -> torch.Tensor:
    """Return uninitialized memory in fp32 for `count` sums of each block of rows (columns.h)."""
    return torch.empty(count, -(-rows // _BLOCK_ROWS), columns, dtype=torch.float32, device="cpu")


@functools.cache
def has_inner_product() -> bool:
    """Return whether oneDNN computes in bf16 on this CPU, with an operator that torch.compile uses too.

    Where it does not (CPUs with AVX2 only), the functions of this module gain nothing: torch's own products of bf16 are
    several times slower in the form that `weight_gradient` chooses.
    """
    x = torch.ones(2, 2, dtype=torch.bfloat16, device="cpu")
    try:
        torch.ops.mkldnn._linear_pointwise(x, x, x[0], "none", [], "")
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
         settings: NormSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, or x itself if `added` is None, and its norm over the last dimension."""
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    out, total = torch.empty_like(x), x if added is None else torch.empty_like(x)
    call(f"norm{_TYPE[x.dtype]}", x, added, weight, bias, total, out, *_shape(x), *_numbers(settings))
    return total, out


def norm_backward(grad: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                  settings: NormSettings, *, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x, weight and bias. `residual` is added to the first.

    The sums over rows do not depend on the number of threads.
    """
    grad, x = grad.contiguous(), x.contiguous()
    residual = None if residual is None else residual.contiguous()
    rows, columns = _shape(x)
    partial = partial_sums(rows, columns, count=2)
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if with_bias else None
    call(f"norm_backward{_TYPE[x.dtype]}", grad, x, residual, weight, partial, dx, dweight, dbias, rows, columns,
         *_numbers(settings))
    return dx, dweight, dbias


def _shape(x: torch.Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _numbers(settings: NormSettings) -> tuple[int, float, float]:
    return int(settings.is_rms), float(settings.eps), float(settings.offset)


def cross_entropy_(logits_CV: torch.Tensor, labels_C: torch.Tensor, *, with_grad: bool, label_smoothing: float,
                   z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropies and the logsumexps, [C] each in fp32.

    With `with_grad`, overwrite the logits with the gradient of the loss that has label smoothing and z-loss.

    Raises IndexError, as torch does, for a label that the vocabulary lacks: C would write outside of the logits.
    """
    rows, vocabulary = logits_CV.shape
    lowest, highest = torch.aminmax(labels_C) if rows else (0, 0)
    if lowest < 0 or highest >= vocabulary:
        raise IndexError(f"labels from {int(lowest)} to {int(highest)}, for a vocabulary of {vocabulary}")
    losses_C, log_z_C = logits_CV.new_empty(2, rows, dtype=torch.float32)
    call(f"cross_entropy{_TYPE[logits_CV.dtype]}", logits_CV, labels_C.contiguous(), losses_C, log_z_C, rows,
         vocabulary, int(with_grad), float(label_smoothing), float(z_loss))
    return losses_C, log_z_C


def has_not_finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether an element is NaN or infinite: a bool scalar."""
    found = torch.empty((), dtype=torch.int64)
    call(f"find_not_finite_{_SUFFIX[x.dtype]}", x, found, x.numel())
    return found.bool()


def euclidean_norm(x: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm as a scalar in fp64, in which it is also summed, without a copy of the tensor."""
    partial = torch.empty(-(-x.numel() // _BLOCK_ELEMENTS), dtype=torch.float64)
    call(f"sum_squares_{_SUFFIX[x.dtype]}", x, partial, x.numel())
    return partial.sum().sqrt()


def scale_to_float_(out: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    """Write x * scale into a contiguous tensor in fp32, and return it."""
    call(f"scale_to_float_{_SUFFIX[x.dtype]}", x, out, x.numel(), scale)
    return out


def multiply_(x: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Multiply a tensor in bf16 in place by a number or a scalar tensor, and return it."""
    call("multiply_bf16", x, x.numel(), float(factor))
    return x


def add_(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add a contiguous matrix in bf16 to columns of a matrix in fp32, without torch's copy of x in fp32."""
    call("add_bf16", x, total, *x.shape, total.stride(0))
