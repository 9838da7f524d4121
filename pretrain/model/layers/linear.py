"""Linear layers, also with matrices that the tensor-parallel ranks share (Shoeybi et al., arXiv 1909.08053, section 3).

The tensors between the layers are shards of the sequences (shared_tensors.py). A column-parallel layer gathers the
sequences, and computes some of its outputs at all positions. A row-parallel layer has some of the inputs; its products
are summed over the ranks, of which each rank gets its positions.

For the backward pass, a column-parallel layer saves the shard instead of the gathered sequences, and gathers them again
(Korthikanti et al., arXiv 2205.05198, section 4.2.2), in parallel with the product that gives the gradient of its
input. The gradient's sum over the ranks runs in parallel with the product that gives the gradient of the weight.
The gradients of what all ranks have, such as the bias of a row-parallel layer, are summed for a block at once
(shared_tensors.summed_gradients).

On one rank all of them are `Linear`.

Shapes: B batch, T positions, t = T / ranks, I inputs, O outputs of this rank, N = B * T.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn
from torch.autograd.function import once_differentiable

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankGroup
from pretrain.model.description import Parameters
from pretrain.model.kernels.linear import LINEAR, Products, linear
from pretrain.model.kernels.norm import Normed
from pretrain.model.parallel.shared_tensors import (
    begin_gather,
    begin_sum_and_scatter,
    gather,
    sum_and_scatter,
)
from pretrain.model.parameters import create_parameters


class Linear(nn.Module):
    """Linear layer with the described parameters: `weight` and perhaps `bias`.

    Args:
        plain_operators: use torch's operators instead of the custom kernels.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, parameters: Parameters, *, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.plain_operators, self.group = plain_operators, groups.tensor
        self.products: Products | None = None  # use_products sets it; None: those for the operands
        create_parameters(self, parameters, groups, optional="bias")

    def forward(self, *inputs: torch.Tensor | Normed | None) -> torch.Tensor:
        return self._product(*inputs, bias_O=self.bias)

    def _product(self, *inputs: Any, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return [B, T, O] for the only input, [B, T, I]."""
        (x_BTI,) = inputs
        if self.plain_operators:
            return F.linear(x_BTI, self.weight, bias_O)
        return linear(x_BTI, self.weight, bias_O, self.products)


def use_products(module: nn.Module, products: Products) -> None:
    """Let the linear layers of a module multiply by `products`. Embedding, head and experts are no such layers."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.products = products


class ColumnLinear(Linear):
    """Linear layer of which each rank computes some of the outputs: [B, t, I] to [B, T, O].

    Args:
        plain_operators: use torch's operators instead of the custom kernels, and save the gathered sequences.
        recomputed: the layer is in a part of the block that is recomputed in the backward pass. Then it saves the
            gathered sequences: they are kept for a short time only, and are not gathered a third time.
    """

    def __init__(self, parameters: Parameters, *, plain_operators: bool = False, groups: ParallelGroups = NO_GROUPS,
                 recomputed: bool = False) -> None:
        super().__init__(parameters, plain_operators=plain_operators, groups=groups)
        self.recomputed = recomputed

    def forward(self, *inputs: torch.Tensor | Normed | None) -> torch.Tensor:
        if self.group.size == 1:
            return super().forward(*inputs)
        (x_BtI,) = inputs
        assert isinstance(x_BtI, torch.Tensor)
        return column_products(x_BtI, [self])[0]


class RowLinear(Linear):
    """Linear layer of which each rank has some of the inputs: [B, T, I] to [B, t, O]; all ranks have the bias."""

    def forward(self, *inputs: torch.Tensor | Normed | None) -> torch.Tensor:
        if self.group.size == 1:
            return super().forward(*inputs)
        out_BtO = sum_and_scatter(self._product(*inputs, bias_O=None), self.group)
        return out_BtO if self.bias is None else out_BtO + self.bias


class ShardLinear(Linear):
    """Linear layer without a bias that each rank applies to its shard of the sequences: [B, t, I] to [B, t, O]."""

    def forward(self, *inputs: torch.Tensor | Normed | None) -> torch.Tensor:
        (x_BtI,) = inputs
        assert isinstance(x_BtI, torch.Tensor)
        return F.linear(x_BtI, self.weight)


def column_products(x_BtI: torch.Tensor, layers: Sequence[ColumnLinear]) -> list[torch.Tensor]:
    """Return the outputs [B, T, O] of layers with the same input, whose sequences are gathered once.

    The parameters are used outside of their layers' forward functions: under ZeRO-3, the calling module must gather
    them (layer_specs.gather_complete_blocks).
    """
    group = layers[0].group
    if layers[0].plain_operators or torch.compiler.is_compiling():
        x_BTI = gather(x_BtI, group)
        return [F.linear(x_BTI, layer.weight, layer.bias) for layer in layers]
    keeps_gathered = all(layer.recomputed for layer in layers)
    return list(_ColumnProducts.apply(x_BtI, group, keeps_gathered, *(layer.weight for layer in layers),
                                      *(layer.bias for layer in layers)))


class _ColumnProducts(torch.autograd.Function):
    """x W^T + b for several W and b, with x gathered from all ranks."""

    @staticmethod
    def forward(ctx: Any, x_BtI: torch.Tensor, group: RankGroup, keeps_gathered: bool,
                *parameters: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        x_BTI = begin_gather(x_BtI, group)()
        ctx.save_for_backward(x_BTI if keeps_gathered else x_BtI, *weights)
        ctx.group, ctx.keeps_gathered, ctx.products = group, keeps_gathered, LINEAR.choose(x_BTI, weights[0])
        return tuple(ctx.products.product(x_BTI, weight_OI, bias_O)
                     for weight_OI, bias_O in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gathered = (lambda: x) if ctx.keeps_gathered else begin_gather(x, ctx.group)
        grads_NO = [grad.flatten(0, -2) for grad in grads]
        dx_NI = grads_NO[0] @ weights[0]
        for grad_NO, weight_OI in zip(grads_NO[1:], weights[1:], strict=True):
            dx_NI.addmm_(grad_NO, weight_OI)
        summed_shard = begin_sum_and_scatter(dx_NI.view(*grads[0].shape[:-1], -1), ctx.group)
        x_NI, needed = gathered().flatten(0, -2), ctx.needs_input_grad[3:]
        dweights = [ctx.products.weight_gradient(x_NI, grad_NO) if needed[index] else None
                    for index, grad_NO in enumerate(grads_NO)]
        dbiases = [ctx.products.bias_gradient(grad_NO) if needed[len(weights) + index] else None
                   for index, grad_NO in enumerate(grads_NO)]
        return summed_shard(), None, None, *dweights, *dbiases
