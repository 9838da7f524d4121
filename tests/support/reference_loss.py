"""The loss with torch's operators and all logits in memory: the reference for the fused loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.kernels.fused_loss import CROSS_ENTROPY, LossTerms
from pretrain.model.layers.vocabulary import Labels, TrainingLoss
from tests.support.tensors import relative_error


def token_weighted_cross_entropy(logits_BTV: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Return the sum of weight * cross-entropy over the tokens: an fp32 scalar."""
    labels_BT, weights_BT = labels
    losses = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), reduction="none")
    return torch.dot(losses, weights_BT.flatten().float())


def linear_cross_entropy(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels,
                         bias: torch.Tensor | None = None, softcap: float = 0.0,
                         terms: LossTerms = CROSS_ENTROPY) -> torch.Tensor:
    """Return the loss of pretrain/model for the logits x W^T + bias."""
    return TrainingLoss(terms)(x_BTD, weight_VD, labels, bias, softcap)


def check_error_of_fused_loss(tokens: int, dtype: torch.dtype) -> None:
    """Compare gradients of the loss with exact ones: they are about as good as those of one product by torch."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in ((1, tokens, 32), (257, 32), (257,))]
    labels = torch.randint(0, 257, (1, tokens), generator=generator)
    weights = torch.rand(1, tokens, generator=generator) * 65536 / tokens  # with a loss scale

    def in_chunks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, (labels, weights), bias)

    def of_all_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return token_weighted_cross_entropy(F.linear(x, weight, bias), (labels, weights))

    def gradients(loss: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        return torch.autograd.grad(loss(*leaves), leaves)

    for exact, torchs, ours in zip(gradients(of_all_logits, torch.float64), gradients(of_all_logits, dtype),
                                   gradients(in_chunks, dtype), strict=True):
        assert relative_error(ours, exact) <= 1.15 * relative_error(torchs, exact)
