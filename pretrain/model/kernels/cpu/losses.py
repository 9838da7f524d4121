"""Cross-entropy in C."""

import torch

from pretrain.model.kernels.cpu.library import call


def cross_entropy_(logits_CV: torch.Tensor, labels_C: torch.Tensor, *, with_grad: bool, label_smoothing: float,
                   z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropies and the logsumexps, [C] each in fp32.

    With `with_grad`, overwrite the logits with the gradient of the loss that has label smoothing and z-loss.

    Raises IndexError, as torch does, for a label that the vocabulary lacks: C would write outside of the logits.
    """
    rows, vocabulary = logits_CV.shape
    lowest, highest = torch.aminmax(labels_C) if rows else (0, 0)
    if lowest < 0 or highest >= vocabulary:
        raise IndexError(f"labels from {int(lowest)} to {int(highest)}, for a vocabulary of {vocabulary}")
    losses_C, log_z_C = logits_CV.new_empty(2, rows, dtype=torch.float32)
    call("cross_entropy", logits_CV, labels_C.contiguous(), losses_C, log_z_C, rows, vocabulary, int(with_grad),
         float(label_smoothing), float(z_loss))
    return losses_C, log_z_C
