"""The norms of the model as one module."""

from typing import Any

import torch
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import Layer, ModelConfig, Parameters, inside
from pretrain.model.kernels.norm import NormSettings, norm, residual_norm, with_source
from pretrain.model.parallel.shared_tensors import sum_over_ranks, summed_gradients
from pretrain.model.parameters import create_parameters


class Norm(nn.Module):
    """LayerNorm or RMSNorm with the described parameters: `weight` and perhaps `bias`.

    Args:
        plain_operators: use torch's operators instead of the custom kernels.
        groups: the tensor-parallel ranks apply the norm to other tokens or heads.
        recomputed: linear layers alone read the norm, and may recompute it in the backward pass (kernels/norm.py).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, config: ModelConfig, parameters: Parameters, *, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS, recomputed: bool = False) -> None:
        super().__init__()
        is_rms = config.norm == "rmsnorm"
        self.settings = NormSettings(is_rms, config.norm_eps, config.norm_offset if is_rms else 0.0)
        self.plain_operators, self.group = plain_operators, groups.tensor
        create_parameters(self, parameters, groups, optional="bias")
        self.recomputed = recomputed and groups.tensor.size == 1  # otherwise linear layers gather the norm

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None, *, returns_sum: bool = False) -> Any:
        """Return the norm of x, as a `Normed` if it can be recomputed.

        With `returns_sum` return x + added, or x if there is no `added`, its norm, and the source of the norm.
        """
        arguments: Any = (self.weight, self.bias, self.settings)
        # ZeRO-3 may have released the weight when a linear layer needs it. It marks its parameters after __init__
        recomputed = self.recomputed and not hasattr(arguments[0], "ds_id")
        if not returns_sum and not recomputed:
            return norm(x, *arguments, plain=self.plain_operators)
        result = residual_norm(x, added, *arguments, plain=self.plain_operators, recomputed=recomputed)
        return result if returns_sum else with_source(*result[1:])


class SplitNorm(Norm):
    """RMSNorm over elements of which each rank of a group has some."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, groups: ParallelGroups) -> None:
        assert config.norm == "rmsnorm", "no family has a LayerNorm of queries and keys over all heads"
        super().__init__(config, parameters, plain_operators=True, groups=groups)
        self.complete_size = parameters["weight"].size

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None, *, returns_sum: bool = False) -> Any:
        """Return the norm of x. The sums of the squares are computed in fp32, and added over the ranks."""
        assert added is None
        assert not returns_sum
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.group)
        normed = wide * torch.rsqrt(squares / self.complete_size + self.settings.eps)
        return (normed * (self.weight.to(wide.dtype) + self.settings.offset)).type_as(x)


class NormLayer(nn.Module):
    """Layer of the model that is a norm alone."""

    def __init__(self, config: ModelConfig, layer: Layer, *, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.norm = Norm(config, inside(layer.by_name(), "norm"), plain_operators=plain_operators, groups=groups)
        self.tensor = groups.tensor

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        with summed_gradients(self, self.tensor):
            normed: torch.Tensor = self.norm(x_BTD)
        return normed


class EmbeddingNorm(NormLayer):
    """Norm after the token embedding."""


class FinalNorm(NormLayer):
    """Norm before the head."""
