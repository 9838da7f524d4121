"""Linear layers, and the products of which they consist.

Shapes: N rows (tokens), I inputs, O outputs.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.norm import Normed, NormSource
from pretrain.model.operators import Operator


class Products:
    """The products of a linear layer, and the sum for its bias, by torch's operators."""

    def product(self, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight^T + bias."""
        return F.linear(x, weight_OI, bias_O)

    def input_gradient(self, grad_NO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return grad @ weight, [N, I]."""
        return grad_NO @ weight_OI

    def weight_gradient(self, x_NI: torch.Tensor, grad_NO: torch.Tensor) -> torch.Tensor:
        """Return grad^T @ x, [O, I]."""
        return grad_NO.t() @ x_NI

    def bias_gradient(self, grad_NO: torch.Tensor) -> torch.Tensor:
        """Return the sum over the rows, [O]."""
        return grad_NO.sum(0)


LINEAR = Operator(Products())  # its inputs: two factors


def linear(x: torch.Tensor | Normed, weight_OI: torch.Tensor, bias_O: torch.Tensor | None,
           products: Products | None = None) -> torch.Tensor:
    """Return x @ weight^T + bias. Saves x and weight for the backward pass, or instead of a norm its source.

    Args:
        products: that the layer uses; None: those for the operands.
    """
    x, source = x if isinstance(x, Normed) else (x, None)
    products = products or LINEAR.choose(x, weight_OI)
    if source is None and products is LINEAR.plain:
        return F.linear(x, weight_OI, bias_O)
    out: torch.Tensor = _Linear.apply(x, weight_OI, bias_O, products, source)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None,
                products: Products, source: NormSource | None) -> torch.Tensor:
        ctx.save_for_backward(weight_OI, *((x,) if source is None else source.inputs))
        ctx.products, ctx.recomputation = products, None  # type: ignore[attr-defined]
        if source is not None:
            ctx.recomputation = source.recomputation  # type: ignore[attr-defined]
            source.recomputation.readers += 1
        return products.product(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_OI, x, *norm_weights = ctx.saved_tensors  # type: ignore[attr-defined]
        products: Products = ctx.products  # type: ignore[attr-defined]
        needed, grad_NO = ctx.needs_input_grad, grads[0].flatten(0, -2)  # type: ignore[attr-defined]
        dx = products.input_gradient(grad_NO, weight_OI).view(x.shape) if needed[0] else None
        if ctx.recomputation is not None and needed[1]:  # type: ignore[attr-defined]
            x = ctx.recomputation.output(x, *norm_weights)  # type: ignore[attr-defined]
        return (dx, products.weight_gradient(x.flatten(0, -2), grad_NO) if needed[1] else None,
                products.bias_gradient(grad_NO) if needed[2] else None, None, None)
