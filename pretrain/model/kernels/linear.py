"""Linear layers: torch's operators, and on CPUs in bf16 the same products in the forms that oneDNN computes fast.

In fp32 on CPUs, the products are in C (cpu/products.c), if they have enough rows. With the shapes of a small model, 768
rows and 128 to 512 columns, they take 0.86 to 0.92 of the time of MKL's on one core of an AMD EPYC.

Shapes: N rows (tokens), I inputs, O outputs.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.cpu import c_functions
from pretrain.model.kernels.cpu.choice import uses_c
from pretrain.model.kernels.fp8 import Fp8Products
from pretrain.model.kernels.norm import NormSource, norm_source

_LEAST_ROWS = 64  # in C, fewer rows do not repay the rearranged copy of the right-hand matrix


def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None,
           fp8: Fp8Products | None = None) -> torch.Tensor:
    """Return x @ weight^T + bias, multiplied in FP8 if `fp8` is given. Saves x and weight for the backward pass.

    Instead of an x that is a norm, it may save the norm's input (kernels/norm.py).
    """
    source = norm_source(x)
    if source is not None or fp8 is not None or _is_in_c(x, weight_OI):
        out: torch.Tensor = _Linear.apply(x, weight_OI, bias_O, fp8, source)
        return out
    return F.linear(x, weight_OI, bias_O)


def product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None,
            fp8: Fp8Products | None = None) -> torch.Tensor:
    """Return x @ weight^T + bias, for use inside an autograd function."""
    if fp8 is not None:
        return fp8.product(x, weight_OI, bias_O)
    return c_functions.linear(x, weight_OI, bias_O) if _is_in_c(x, weight_OI) else F.linear(x, weight_OI, bias_O)


def input_gradient(grad_NO: torch.Tensor, weight_OI: torch.Tensor, fp8: Fp8Products | None = None) -> torch.Tensor:
    """Return grad @ weight, [N, I]."""
    if fp8 is not None:
        return fp8.input_gradient(grad_NO, weight_OI)
    if grad_NO.dtype == torch.float32 and _is_in_c(grad_NO, weight_OI):
        return c_functions.input_gradient_fp32(grad_NO, weight_OI)
    return grad_NO @ weight_OI


def weight_gradient(x_NI: torch.Tensor, grad_NO: torch.Tensor, fp8: Fp8Products | None = None) -> torch.Tensor:
    """Return grad^T @ x, [O, I]."""
    if fp8 is not None:
        return fp8.weight_gradient(x_NI, grad_NO)
    return c_functions.weight_gradient(x_NI, grad_NO) if _is_in_c(x_NI, grad_NO) else grad_NO.t() @ x_NI


def bias_gradient(grad_NO: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows, [O]."""
    return c_functions.column_sum(grad_NO) if uses_c("linear", grad_NO) else grad_NO.sum(0)


def _is_in_c(x: torch.Tensor, other: torch.Tensor) -> bool:
    if x.dtype != other.dtype:
        return False
    if x.dtype == torch.float32:
        return x.numel() >= _LEAST_ROWS * x.shape[-1] and uses_c("linear_fp32", x, torch.float32)
    return uses_c("linear", x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None,
                fp8: Fp8Products | None, source: NormSource | None) -> torch.Tensor:
        ctx.save_for_backward(weight_OI, *((x,) if source is None else source.inputs))
        ctx.fp8, ctx.recomputation = fp8, None  # type: ignore[attr-defined]
        if source is not None:
            ctx.recomputation = source.recomputation  # type: ignore[attr-defined]
            source.recomputation.readers += 1
        return product(x, weight_OI, bias_O, fp8)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_OI, x, *norm_weights = ctx.saved_tensors  # type: ignore[attr-defined]
        fp8: Fp8Products | None = ctx.fp8  # type: ignore[attr-defined]
        needed, grad_NO = ctx.needs_input_grad, grads[0].flatten(0, -2)  # type: ignore[attr-defined]
        dx = input_gradient(grad_NO, weight_OI, fp8).view(x.shape) if needed[0] else None
        if ctx.recomputation is not None and needed[1]:  # type: ignore[attr-defined]
            x = ctx.recomputation.output(x, *norm_weights)  # type: ignore[attr-defined]
        return (dx, weight_gradient(x.flatten(0, -2), grad_NO, fp8) if needed[1] else None,
                bias_gradient(grad_NO) if needed[2] else None, None, None)
