"""Passes over contiguous gradients in bf16 or fp32, in C."""

import torch

from pretrain.model.kernels.cpu.library import call

_BLOCK = 16384  # elements of a partial sum, as in gradients.c
_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def has_not_finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether an element is NaN or infinite: a bool scalar."""
    found = torch.empty((), dtype=torch.int64)
    call(f"find_not_finite_{_SUFFIX[x.dtype]}", x, found, x.numel())
    return found.bool()


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm as a scalar in fp64, in which it is also summed, without a copy of the tensor."""
    partial = torch.empty(-(-x.numel() // _BLOCK), dtype=torch.float64)
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
