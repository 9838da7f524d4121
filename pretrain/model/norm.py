"""The norms of the model as one module."""

from typing import Any

import torch
from torch import nn

from pretrain.model.config import ModelConfig
from pretrain.model.kernels.norm import NormSettings, norm, residual_norm


class Norm(nn.Module):
    """LayerNorm or RMSNorm over `size` elements; 0: over D. initialize_parameters or a checkpoint fills it.

    Args:
        plain_operators: use torch's operators instead of the custom kernels.
    """

    def __init__(self, config: ModelConfig, size: int = 0, *, plain_operators: bool = False) -> None:
        super().__init__()
        is_rms = config.norm == "rmsnorm"
        self.settings = NormSettings(is_rms, config.norm_eps, config.norm_offset if is_rms else 0.0)
        self.plain_operators = plain_operators
        self.weight = nn.Parameter(torch.ones(size or config.hidden_size))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if config.norm_bias and not is_rms else None

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None, *, returns_sum: bool = False) -> Any:
        """Return the norm of x. With `returns_sum` return x + added, or x if there is no `added`, and its norm."""
        arguments: Any = (self.weight, self.bias, self.settings)
        if returns_sum:
            return residual_norm(x, added, *arguments, plain=self.plain_operators)
        return norm(x, *arguments, plain=self.plain_operators)


class _NormLayer(nn.Module):
    """Layer of the model that is a norm alone."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool = False) -> None:
        super().__init__()
        self.norm = Norm(config, plain_operators=plain_operators)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x_BTD)
        return normed


class EmbeddingNorm(_NormLayer):
    """Norm after the token embedding."""


class FinalNorm(_NormLayer):
    """Norm before the head."""
