"""The loss of every engine."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)


def token_weighted_cross_entropy(
    logits_BTV: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
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
