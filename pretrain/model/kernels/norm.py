"""LayerNorm and RMSNorm, with the addition before them.

A linear layer needs its input again for the gradient of its weight. Where an implementation computes a norm again
quickly, linear layers save the norm's input, which is kept anyway, instead of the norm: two tensors fewer in a block.
The bits are the same.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.operators import Operator


class NormSettings(NamedTuple):
    """Formula and constants of a norm."""

    is_rms: bool
    eps: float
    offset: float = 0.0  # is added to the weight


class NormKernel:
    """Computes norms over the last dimension by torch's operators. torch's RMSNorm on CPUs keeps two fp32 tensors."""

    is_recomputed = False  # linear layers call `recompute` in the backward pass, instead of saving the norm

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
                 settings: NormSettings) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + added, or x itself if `added` is None, and its norm."""
        total = x if added is None else x + added
        return total, _torch_norm(total, weight, bias, settings)

    def recompute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                  settings: NormSettings) -> torch.Tensor:
        """Return the norm of x without a gradient."""
        raise NotImplementedError


NORM = Operator(NormKernel())  # its inputs: x, weight, settings


class Recomputation:
    """Recomputes a norm for the linear layers that read it: once for all of them, until the last one has it."""

    def __init__(self, kernel: NormKernel, settings: NormSettings) -> None:
        self.readers = 0  # linear layers whose backward pass is still to come
        self._kernel, self._settings = kernel, settings
        self._out: torch.Tensor | None = None

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the norm of x for the next reader."""
        out = self._out if self._out is not None else self._kernel.recompute(x, weight, bias, self._settings)
        self.readers -= 1
        self._out = out if self.readers > 0 else None
        return out


class NormSource(NamedTuple):
    """Inputs of a norm, which a linear layer saves instead of the norm that it is given: others save them, too."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # x, weight, bias
    recomputation: Recomputation


class Normed(NamedTuple):
    """A norm for linear layers that recompute it."""

    out: torch.Tensor
    source: NormSource


def with_source(out: torch.Tensor, source: NormSource | None) -> torch.Tensor | Normed:
    """Return a norm for linear layers, which recompute it if it has a source."""
    return out if source is None else Normed(out, source)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: NormSettings, *,
         plain: bool = False) -> torch.Tensor:
    """Return the norm of x over its last dimension. `plain`: use torch's operators."""
    return residual_norm(x, None, weight, bias, settings, plain=plain)[1]


def residual_norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
                  settings: NormSettings, *, plain: bool = False,
                  recomputed: bool = False) -> tuple[torch.Tensor, torch.Tensor, NormSource | None]:
    """Return the sum x + added, or x itself if `added` is None, the norm of the sum, and the source of the norm.

    The sum is the residual connection. Its gradient is added in the same pass that computes the norm's gradient.

    Args:
        recomputed: linear layers alone read the norm. Without it, and where the implementation does not recompute
            norms, there is no source.
    """
    kernel = NORM.choose(x, weight, settings, plain=plain)
    total, out = kernel(x, added, weight, bias, settings)
    if not recomputed or not kernel.is_recomputed:
        return total, out, None
    return total, out, NormSource((total.detach(), weight, bias), Recomputation(kernel, settings))


def _torch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                settings: NormSettings) -> torch.Tensor:
    shape = (x.shape[-1],)
    if not settings.is_rms:
        return F.layer_norm(x, shape, weight, bias, settings.eps)
    if not settings.offset:
        return F.rms_norm(x, shape, weight, settings.eps)
    return F.rms_norm(x.float(), shape, weight.float() + settings.offset, settings.eps).type_as(x)
