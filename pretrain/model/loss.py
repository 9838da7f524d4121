"""Weighted cross-entropy of a micro-batch, from logits or directly from the hidden states."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.kernels.fused_loss import fused_linear_cross_entropy

Labels = tuple[torch.Tensor, torch.Tensor]  # (labels_BT int64, weights_BT float32)


def token_weighted_cross_entropy(logits_BTV: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Return the sum of weight * cross-entropy over the tokens of a micro-batch: an fp32 scalar.

    Nothing is divided here: the weights contain the normalization (data/loader.py, Loader).

    Args:
        logits_BTV: of any floating dtype; the softmax is computed in fp32.
        labels: (labels_BT int64, weights_BT float32); a masked token has weight 0 and any valid label.
    """
    labels_BT, weights_BT = labels
    losses = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), reduction="none")
    return torch.dot(losses, weights_BT.flatten().float())


def linear_cross_entropy(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Return `token_weighted_cross_entropy` of the logits x W^T without materializing all logits."""
    labels_BT, weights_BT = labels
    return fused_linear_cross_entropy(x_BTD, weight_VD, labels_BT, weights_BT)
