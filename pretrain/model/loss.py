"""The loss of every engine, from logits or, without them, from the hidden states."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.kernels.fused_loss import fused_linear_cross_entropy

Labels = tuple[torch.Tensor, torch.Tensor]  # (labels_BT int64, weights_BT float32)


def token_weighted_cross_entropy(logits_BTV: torch.Tensor, labels: Labels) -> torch.Tensor:
    """fp32 scalar: the sum of weight * cross-entropy over the tokens of a micro-batch.

    The weights hold the whole normalisation: an engine's mean over micro-batches and data-parallel ranks
    of this sum is the mean over the unmasked tokens of the global batch.

    Args:
        logits_BTV: any floating dtype; the softmax is taken in fp32.
        labels: (labels_BT int64, weights_BT float32); a masked token has weight 0 and any valid label.
    """
    labels_BT, weights_BT = labels
    losses = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), reduction="none")
    return torch.dot(losses, weights_BT.flatten().float())


def linear_cross_entropy(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels) -> torch.Tensor:
    """`token_weighted_cross_entropy` of the logits x W^T, which never exist as a whole."""
    labels_BT, weights_BT = labels
    return fused_linear_cross_entropy(x_BTD, weight_VD, labels_BT, weights_BT)
