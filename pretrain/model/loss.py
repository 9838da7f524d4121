"""The loss: weighted cross-entropy of a micro-batch, computed from the hidden states."""

import torch

from pretrain.model.kernels.fused_loss import fused_linear_cross_entropy

Labels = tuple[torch.Tensor, torch.Tensor]
"""(labels_BT int64, weights_BT float32); a masked token has weight 0 and any valid label"""


def linear_cross_entropy(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels,
                         bias: torch.Tensor | None = None, softcap: float = 0.0) -> torch.Tensor:
    """Return the sum of weight * cross-entropy over the tokens, for the logits x W^T + bias: an fp32 scalar.

    The sum is not divided: the weights contain the normalization (data/loader.py, Loader).

    Args:
        softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
    """
    labels_BT, weights_BT = labels
    return fused_linear_cross_entropy(x_BTD, weight_VD, labels_BT, weights_BT, bias, softcap)
