"""The loss with torch's operators and all logits in memory: the reference for the fused loss."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.kernels.fused_loss import CROSS_ENTROPY, LossTerms
from pretrain.model.layers.vocabulary import Labels, TrainingLoss


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
