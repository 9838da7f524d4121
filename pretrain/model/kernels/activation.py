"""The second half of the MLP as one operator: down(activation(up)), or down(activation(gate) * up).

Plain autograd saves the activation's input, its output and, with a gate, the product. This operator saves only the
inputs and recomputes the rest in the backward pass. A block then saves a quarter less (16 B T D elements with F = 4 D),
at the cost of one more pass over B T F elements.

Shapes: B batch, T positions, D hidden size, F inner size of the MLP, N = B * T.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.cpu import c_functions
from pretrain.model.kernels.cpu.choice import uses_c
from pretrain.model.kernels.fp8 import Fp8Products
from pretrain.model.kernels.linear import bias_gradient, input_gradient, product, weight_gradient

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2")  # relu2: relu, squared


def activated_linear(activation: str, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None, weight_DF: torch.Tensor,
                     bias_D: torch.Tensor | None, fp8: Fp8Products | None = None) -> torch.Tensor:
    """Return [B, T, D]. `activation` is one of ACTIVATIONS. Saves up, gate and weight for the backward pass."""
    out: torch.Tensor = _ActivatedLinear.apply(activation, up_BTF, gate_BTF, weight_DF, bias_D, fp8)
    return out


def plain_activated_linear(activation: str, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                           weight_DF: torch.Tensor, bias_D: torch.Tensor | None) -> torch.Tensor:
    """Compute the same as `activated_linear` with torch's operators and plain autograd."""
    activated_BTF = torch_activation(activation, up_BTF if gate_BTF is None else gate_BTF)
    return F.linear(activated_BTF if gate_BTF is None else activated_BTF * up_BTF, weight_DF, bias_D)


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, activation: str, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                weight_DF: torch.Tensor, bias_D: torch.Tensor | None, fp8: Fp8Products | None) -> torch.Tensor:
        ctx.save_for_backward(up_BTF, gate_BTF, weight_DF)  # type: ignore[arg-type]  # it accepts None
        ctx.activation, ctx.fp8 = activation, fp8  # type: ignore[attr-defined]
        inner_BTF = activate(activation, up_BTF) if gate_BTF is None else activate(activation, gate_BTF, up_BTF)
        return product(inner_BTF, weight_DF, bias_D, fp8)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_ND, needed = grads[0].flatten(0, -2), ctx.needs_input_grad  # type: ignore[attr-defined]
        saved = (ctx.activation, grad_ND, *ctx.saved_tensors, ctx.fp8)  # type: ignore[attr-defined]
        gradients = _gradients_in_c(*saved) if _is_in_c(saved[0], saved[2]) else _gradients(*saved)
        return None, *gradients, bias_gradient(grad_ND) if needed[4] else None, None


def _gradients(activation: str, grad_ND: torch.Tensor, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
               weight_DF: torch.Tensor,
               fp8: Fp8Products | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the gradients of up, gate and weight. The order of the operators keeps few inner tensors at a time."""
    activated_BTF = activate(activation, up_BTF if gate_BTF is None else gate_BTF)
    inner_BTF = activated_BTF if gate_BTF is None else activated_BTF * up_BTF
    dweight_DF = weight_gradient(inner_BTF.flatten(0, -2), grad_ND, fp8)
    del inner_BTF  # one of a block's largest tensors: free it early
    if gate_BTF is None:
        del activated_BTF
    dinner_BTF = input_gradient(grad_ND, weight_DF, fp8).view_as(up_BTF)
    if gate_BTF is None:
        return activate_backward(activation, dinner_BTF, up_BTF), None, dweight_DF
    dup_BTF = activated_BTF.mul_(dinner_BTF)
    return dup_BTF, activate_backward(activation, dinner_BTF.mul_(up_BTF), gate_BTF), dweight_DF


def _gradients_in_c(activation: str, grad_ND: torch.Tensor, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                    weight_DF: torch.Tensor,
                    fp8: Fp8Products | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the same as `_gradients`. One pass computes the inner tensor and the gradients of up and gate."""
    dinner_BTF, dgate_BTF = input_gradient(grad_ND, weight_DF, fp8).view_as(up_BTF), None
    if gate_BTF is None:
        dup_BTF, inner_BTF = c_functions.activate_backward(activation, dinner_BTF, up_BTF)
    else:
        dup_BTF, dgate_BTF, inner_BTF = c_functions.gated_backward(activation, dinner_BTF, gate_BTF, up_BTF)
    return dup_BTF, dgate_BTF, weight_gradient(inner_BTF.flatten(0, -2), grad_ND, fp8)


def _is_in_c(activation: str, x: torch.Tensor) -> bool:
    if x.dtype == torch.float32:
        return activation in c_functions.ACTIVATIONS_IN_C_FP32 and uses_c("activation", x, torch.float32)
    return activation in c_functions.ACTIVATIONS_IN_C and uses_c("activation", x)


def activate(name: str, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Apply one of ACTIVATIONS to each element, and multiply the result by `up`, if there is one."""
    if _is_in_c(name, x):
        return c_functions.activate(name, x) if up is None else c_functions.gated(name, x, up)
    return torch_activation(name, x) if up is None else torch_activation(name, x) * up


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
