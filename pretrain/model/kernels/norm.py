"""LayerNorm and RMSNorm, with the addition before them: torch's operators, or one C function on CPUs in bf16.

The C function keeps only the sum for the backward pass. torch's RMSNorm on CPUs keeps two tensors in fp32.

A linear layer needs its input again for the gradient of its weight. If that is the output of the C function, the layer
saves the sum, which is kept anyway, and recomputes the norm: two tensors fewer in a block. The bits are the same.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.cpu import c_functions
from pretrain.model.kernels.cpu.c_functions import NormSettings
from pretrain.model.kernels.cpu.choice import uses_c


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: NormSettings, *,
         plain: bool = False, recomputed: bool = False) -> torch.Tensor:
    """Return the norm of x over its last dimension. `plain`: use torch's operators. `recomputed`: as below."""
    return residual_norm(x, None, weight, bias, settings, plain=plain, recomputed=recomputed)[1]


def residual_norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
                  settings: NormSettings, *, plain: bool = False,
                  recomputed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum x + added, or x itself if `added` is None, and the norm of the sum.

    The sum is the residual connection. Its gradient is added in the same pass that computes the norm's gradient.

    Args:
        recomputed: linear layers that are given the norm do not save it. Nothing else should save it either.
    """
    if plain or weight.dtype != x.dtype or not uses_c("norm", x):
        total = x if added is None else x + added
        return total, _torch_norm(total, weight, bias, settings)
    total, out = _ResidualNorm.apply(x, added, weight, bias, settings)
    if recomputed:
        out.norm_source = NormSource((total.detach(), weight, bias), Recomputation(settings))
    return total, out


class Recomputation:
    """Recomputes a norm for the linear layers that read it: once for all of them, until the last one has it."""

    def __init__(self, settings: NormSettings) -> None:
        self.readers = 0  # linear layers whose backward pass is still to come
        self._settings, self._out = settings, None  # type: NormSettings, torch.Tensor | None

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the norm of x for the next reader."""
        out = self._out if self._out is not None else c_functions.norm(x, None, weight, bias, self._settings)[1]
        self.readers -= 1
        self._out = out if self.readers > 0 else None
        return out


class NormSource(NamedTuple):
    """What a linear layer saves instead of the norm that it is given: inputs of the norm, which others save too."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # x, weight, bias
    recomputation: Recomputation


def norm_source(x: torch.Tensor) -> NormSource | None:
    """Return the source of a tensor that `residual_norm` returned with `recomputed`; None for other tensors."""
    source: NormSource | None = getattr(x, "norm_source", None)
    return source


def _torch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                settings: NormSettings) -> torch.Tensor:
    shape = (x.shape[-1],)
    if not settings.is_rms:
        return F.layer_norm(x, shape, weight, bias, settings.eps)
    if not settings.offset:
        return F.rms_norm(x, shape, weight, settings.eps)
    return F.rms_norm(x.float(), shape, weight.float() + settings.offset, settings.eps).type_as(x)


class _ResidualNorm(torch.autograd.Function):
    """Sum and norm in C. The gradient of the sum, or of the norm, may be missing."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor,
                bias: torch.Tensor | None, settings: NormSettings) -> tuple[torch.Tensor, torch.Tensor]:
        total, out = c_functions.norm(x, added, weight, bias, settings)
        ctx.save_for_backward(x if added is None else total, weight)  # x may be a view, and `total` a copy of it
        ctx.settings, ctx.with_bias = settings, bias is not None  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        if grads[1] is None:
            return grads[0], grads[0] if ctx.needs_input_grad[1] else None, None, None, None
        dtotal, dweight, dbias = c_functions.norm_backward(
            grads[1], total, grads[0], weight, ctx.settings,  # type: ignore[attr-defined]
            with_bias=ctx.with_bias)  # type: ignore[attr-defined]
        return dtotal, dtotal if ctx.needs_input_grad[1] else None, dweight, dbias, None  # type: ignore[attr-defined]
