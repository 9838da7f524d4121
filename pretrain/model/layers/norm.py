"""The norms of the model as one module."""

from typing import Any

import torch
from torch import nn

from pretrain.distributed.parallel_groups import ALONE, NO_GROUPS, ParallelGroups, RankGroup
from pretrain.model.config import ModelConfig
from pretrain.model.kernels.norm import NormSettings, norm, residual_norm
from pretrain.model.parallel.parts import Part, set_part, split_range
from pretrain.model.parallel.shared_tensors import sum_gradient, sum_over_ranks


class Norm(nn.Module):
    """LayerNorm or RMSNorm over `size` elements; 0: over D. initialize_parameters or a checkpoint fills it.

    Args:
        plain_operators: use torch's operators instead of the custom kernels.
        group: tensor-parallel ranks, each of which applies the norm to other tokens or heads.
    """

    def __init__(self, config: ModelConfig, size: int = 0, *, plain_operators: bool = False,
                 group: RankGroup = ALONE) -> None:
        super().__init__()
        is_rms = config.norm == "rmsnorm"
        self.settings = NormSettings(is_rms, config.norm_eps, config.norm_offset if is_rms else 0.0)
        self.plain_operators, self.group = plain_operators, group
        self.weight = nn.Parameter(torch.ones(size or config.hidden_size))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if config.norm_bias and not is_rms else None

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None, *, returns_sum: bool = False) -> Any:
        """Return the norm of x. With `returns_sum` return x + added, or x if there is no `added`, and its norm."""
        bias = None if self.bias is None else sum_gradient(self.bias, self.group)
        arguments: Any = (sum_gradient(self.weight, self.group), bias, self.settings)
        if returns_sum:
            return residual_norm(x, added, *arguments, plain=self.plain_operators)
        return norm(x, *arguments, plain=self.plain_operators)


class SplitNorm(Norm):
    """RMSNorm over `size` elements, of which each rank of a group has some."""

    def __init__(self, config: ModelConfig, size: int, *, group: RankGroup) -> None:
        assert config.norm == "rmsnorm", "no family has a LayerNorm of queries and keys over all heads"
        own = split_range(size, group)
        super().__init__(config, own[1] - own[0], plain_operators=True, group=group)
        self.complete_size = size
        set_part(self.weight, Part((size,), 0, (own,)))

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None, *, returns_sum: bool = False) -> Any:
        """Return the norm of x. The sums of the squares are computed in fp32, and added over the ranks."""
        assert added is None
        assert not returns_sum
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.group)
        normed = wide * torch.rsqrt(squares / self.complete_size + self.settings.eps)
        return (normed * (self.weight.to(wide.dtype) + self.settings.offset)).type_as(x)


class _NormLayer(nn.Module):
    """Layer of the model that is a norm alone."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.norm = Norm(config, plain_operators=plain_operators, group=groups.tensor)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x_BTD)
        return normed


class EmbeddingNorm(_NormLayer):
    """Norm after the token embedding."""


class FinalNorm(_NormLayer):
    """Norm before the head."""
