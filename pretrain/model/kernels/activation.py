"""The second half of the MLP as one operator: down(activation(up)), or down(activation(gate) * up).

Plain autograd saves the activation's input, its output and, with a gate, the product. This operator saves only the
inputs and recomputes the rest in the backward pass. A block then saves a quarter less (16 B T D elements with F = 4 D),
at the cost of one more pass over B T F elements.

Shapes: B batch, T positions, D hidden size, F inner size of the MLP, N = B * T.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.linear import LINEAR, Products
from pretrain.model.operators import Operator

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2")  # relu2: relu, squared


class ActivationKernel:
    """Computes activations, and the gradients of `activated_linear`, by torch's operators."""

    def activate(self, name: str, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Apply one of ACTIVATIONS to each element, and multiply the result by `up`, if there is one."""
        return torch_activation(name, x) if up is None else torch_activation(name, x) * up

    def gradients(self, name: str, grad_ND: torch.Tensor, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                  weight_DF: torch.Tensor,
                  products: Products) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return the gradients of up, gate and weight. The order of the operators keeps few inner tensors at a time."""
        activated_BTF = self.activate(name, up_BTF if gate_BTF is None else gate_BTF)
        inner_BTF = activated_BTF if gate_BTF is None else activated_BTF * up_BTF
        dweight_DF = products.weight_gradient(inner_BTF.flatten(0, -2), grad_ND)
        del inner_BTF  # one of a block's largest tensors: free it early
        if gate_BTF is None:
            del activated_BTF
        dinner_BTF = products.input_gradient(grad_ND, weight_DF).view_as(up_BTF)
        if gate_BTF is None:
            return activate_backward(name, dinner_BTF, up_BTF), None, dweight_DF
        dup_BTF = activated_BTF.mul_(dinner_BTF)
        return dup_BTF, activate_backward(name, dinner_BTF.mul_(up_BTF), gate_BTF), dweight_DF


ACTIVATION = Operator(ActivationKernel())  # its inputs: name, x


def activated_linear(activation: str, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None, weight_DF: torch.Tensor,
                     bias_D: torch.Tensor | None, products: Products | None = None) -> torch.Tensor:
    """Return [B, T, D]. `activation` is one of ACTIVATIONS. Saves up, gate and weight for the backward pass.

    Args:
        products: that the layer uses; None: those for the operands.
    """
    out: torch.Tensor = _ActivatedLinear.apply(activation, up_BTF, gate_BTF, weight_DF, bias_D, products)
    return out


def plain_activated_linear(activation: str, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                           weight_DF: torch.Tensor, bias_D: torch.Tensor | None) -> torch.Tensor:
    """Compute the same as `activated_linear` with torch's operators and plain autograd."""
    activated_BTF = torch_activation(activation, up_BTF if gate_BTF is None else gate_BTF)
    return F.linear(activated_BTF if gate_BTF is None else activated_BTF * up_BTF, weight_DF, bias_D)


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, activation: str, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                weight_DF: torch.Tensor, bias_D: torch.Tensor | None, products: Products | None) -> torch.Tensor:
        ctx.save_for_backward(up_BTF, gate_BTF, weight_DF)  # type: ignore[arg-type]  # it accepts None
        kernel = ACTIVATION.choose(activation, up_BTF)
        inner_BTF = kernel.activate(activation, up_BTF) if gate_BTF is None else \
            kernel.activate(activation, gate_BTF, up_BTF)
        products = products or LINEAR.choose(inner_BTF, weight_DF)
        ctx.activation, ctx.kernel, ctx.products = activation, kernel, products  # type: ignore[attr-defined]
        return products.product(inner_BTF, weight_DF, bias_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_ND, needed = grads[0].flatten(0, -2), ctx.needs_input_grad  # type: ignore[attr-defined]
        products: Products = ctx.products  # type: ignore[attr-defined]
        gradients = ctx.kernel.gradients(  # type: ignore[attr-defined]
            ctx.activation, grad_ND, *ctx.saved_tensors, products)  # type: ignore[attr-defined]
        return None, *gradients, products.bias_gradient(grad_ND) if needed[4] else None, None


def activate(name: str, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Apply one of ACTIVATIONS to each element, and multiply the result by `up`, if there is one."""
    return ACTIVATION.choose(name, x).activate(name, x, up)


def activate_backward(name: str, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return grad times the activation's derivative at x, computed by torch."""
    if name == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if name == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    if name == "relu2":
        return F.relu(x).mul_(grad).mul_(2)
    return torch.ops.aten.gelu_backward(grad, x, approximate=_approximation(name))


def torch_activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply one of ACTIVATIONS to each element with torch's operators."""
    if name == "silu":
        return F.silu(x)
    if name in ("relu", "relu2"):
        return F.relu(x) if name == "relu" else F.relu(x).square()
    return F.gelu(x, approximate=_approximation(name))


def _approximation(name: str) -> str:
    return "tanh" if name == "gelu_tanh" else "none"
