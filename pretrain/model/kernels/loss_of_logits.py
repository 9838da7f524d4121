"""Cross-entropy of given logits, for models whose head is more than a matrix product. See fused_loss.py for the terms.

Shapes: B batch, T positions, V vocabulary.
"""

import torch

from pretrain.model.kernels.fused_loss import LossTerms


def loss_of_logits(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, weights_BT: torch.Tensor,
                   terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of weight * cross-entropy and of weight * logsumexp(logits)^2 over the tokens: fp32 scalars.

    The softmax is computed in fp32. The first sum has the gradient of the loss with all `terms`; the second has none.
    """
    logits_BTV = logits_BTV.float()
    logs_BT = logits_BTV.logsumexp(-1)
    losses_BT = logs_BT - logits_BTV.gather(-1, labels_BT[..., None])[..., 0]
    loss = (losses_BT * weights_BT).sum()
    squares = (logs_BT.detach().square() * weights_BT).sum()
    if not loss.requires_grad or not (terms.label_smoothing or terms.z_loss):
        return loss, squares
    mean_losses_BT = logs_BT - logits_BTV.mean(-1)  # of all words
    extra_BT = terms.label_smoothing * (mean_losses_BT - losses_BT) + terms.z_loss * logs_BT.square()
    extra = (extra_BT * weights_BT).sum()
    return loss + (extra - extra.detach()), squares
