"""Activation functions in C, each in one pass over its inputs."""

import torch

from pretrain.model.kernels.cpu.library import call

NAMES = ("gelu", "gelu_tanh", "silu")  # the others are as fast in torch


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of each element."""
    x = x.contiguous()
    out = torch.empty_like(x)
    call(name, x, out, x.numel())
    return out


def activate_backward(name: str, grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x, which is written to `grad` if that is contiguous, and the activation of x."""
    grad, x = grad.contiguous(), x.contiguous()
    activated = torch.empty_like(x)
    call(f"{name}_backward", grad, x, activated, x.numel())
    return grad, activated


def gated(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    call(f"{name}_gated", gate, up, out, up.numel())
    return out


def gated_backward(name: str, grad: torch.Tensor, gate: torch.Tensor,
                   up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of up and gate, and activation(gate) * up. The first is written to a contiguous `grad`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    inner, dgate = torch.empty_like(up), torch.empty_like(up)
    call(f"{name}_gated_backward", grad, gate, up, inner, dgate, up.numel())
    return grad, dgate, inner
