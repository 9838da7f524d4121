"""LayerNorm and RMSNorm in C, with the addition of a residual connection before them, in one pass."""

from typing import NamedTuple

import torch

from pretrain.model.kernels.cpu.library import call
from pretrain.model.kernels.cpu.matrices import partial_sums


class NormSettings(NamedTuple):
    """Formula and constants of a norm, as in norm.c."""

    is_rms: bool
    eps: float
    offset: float = 0.0  # is added to the weight


def norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
         settings: NormSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, or x itself if `added` is None, and its norm over the last dimension."""
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    out, total = torch.empty_like(x), x if added is None else torch.empty_like(x)
    call("norm", x, added, weight, bias, total, out, *_shape(x), *_numbers(settings))
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
    call("norm_backward", grad, x, residual, weight, partial, dx, dweight, dbias, rows, columns, *_numbers(settings))
    return dx, dweight, dbias


def _shape(x: torch.Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _numbers(settings: NormSettings) -> tuple[int, float, float]:
    return int(settings.is_rms), float(settings.eps), float(settings.offset)
