"""Matrix products of linear layers in the forms that oneDNN computes fast, transposed copies, and sums of columns.

Shapes: N rows (tokens), I inputs, O outputs.
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.kernels.cpu.library import call

_LEAST_WIDTH = 512  # narrower layers gain nothing from a transposed copy: measured on an AMX core
_BLOCK_ROWS = 64  # rows that one thread adds; columns.h repeats it


def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight^T + bias. Uses `inner_product` if the dtypes are the same."""
    if bias_O is not None and bias_O.dtype != x.dtype:
        return F.linear(x, weight_OI, bias_O)
    return inner_product(x, weight_OI, bias_O)


def inner_product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight^T + bias as oneDNN's inner product. torch's operator adds a bias in another pass."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return out


def weight_gradient(x_NI: torch.Tensor, grad_NO: torch.Tensor) -> torch.Tensor:
    """Return grad^T @ x, [O, I], with the smaller one transposed first: oneDNN is half as fast if it has to do so."""
    if min(x_NI.shape[1], grad_NO.shape[1]) < _LEAST_WIDTH:
        return grad_NO.t() @ x_NI
    if x_NI.shape[1] <= grad_NO.shape[1]:
        return transposed(transposed(x_NI) @ grad_NO)
    return transposed(grad_NO) @ x_NI


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
