"""The loss: weighted cross-entropy of a micro-batch, computed from the hidden states."""

import torch

from pretrain.model.kernels.fused_loss import CROSS_ENTROPY, LossTerms, fused_linear_cross_entropy
from pretrain.model.kernels.vocabulary_shards import VocabularyShard

Labels = tuple[torch.Tensor, torch.Tensor]
"""(labels_BT int64, weights_BT float32); a masked token has weight 0 and any valid label"""

__all__ = ["CROSS_ENTROPY", "Labels", "LossTerms", "TrainingLoss", "linear_cross_entropy"]


def linear_cross_entropy(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels,
                         bias: torch.Tensor | None = None, softcap: float = 0.0,
                         terms: LossTerms = CROSS_ENTROPY, *, plain_operators: bool = False) -> torch.Tensor:
    """Return the sum of weight * cross-entropy over the tokens, for the logits x W^T + bias: an fp32 scalar.

    The sum is not divided: the weights contain the normalization (data/loader.py, Loader).

    Args:
        softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
        terms: the gradient is that of the cross-entropy and these terms; the returned value has the cross-entropy only.
        plain_operators: use torch's operators instead of the C kernels.
    """
    return TrainingLoss(terms, plain_operators=plain_operators)(x_BTD, weight_VD, labels, bias, softcap)


class TrainingLoss:
    """The loss with its additional terms. It also averages the squared logsumexps until the next `take_squares`.

    The additional terms affect the gradients only. Evaluation and logged training losses are cross-entropies, which can
    be compared between runs with different terms.
    """

    def __init__(self, terms: LossTerms = CROSS_ENTROPY, *, plain_operators: bool = False) -> None:
        self.terms, self.plain_operators = terms, plain_operators
        self._squares: torch.Tensor | None = None  # weighted sum over the tokens of `_micro_batches` micro-batches
        self._micro_batches = 0

    def __call__(self, x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels,
                 bias: torch.Tensor | None = None, softcap: float = 0.0,
                 shard: VocabularyShard | None = None) -> torch.Tensor:
        """Compute `linear_cross_entropy`; with a shard of the vocabulary, see `fused_linear_cross_entropy`."""
        labels_BT, weights_BT = labels
        loss, squares = fused_linear_cross_entropy(x_BTD, weight_VD, labels_BT, weights_BT, bias, softcap, self.terms,
                                                   self.plain_operators, shard)
        if self.terms.z_loss and loss.requires_grad:
            self._squares = squares if self._squares is None else self._squares + squares
            self._micro_batches += 1
        return loss

    def take_squares(self) -> torch.Tensor | None:
        """Return the mean squared logsumexp of the training micro-batches since the last call; None without any.

        Averaged over the data-parallel ranks, it is the mean over all tokens, as for the losses.
        """
        mean = None if self._squares is None else self._squares / self._micro_batches
        self._squares, self._micro_batches = None, 0
        return mean
