"""The loss in C, compared with torch's operators in fp64 and in bf16."""

import pytest
import torch

from pretrain.extensions.cpu_kernels import library
from pretrain.extensions.cpu_kernels.c_functions import cross_entropy_
from pretrain.model.kernels.fused_loss import LossTerms

pytestmark = pytest.mark.skipif(library._library() is None, reason="no C compiler")
TERMS = [LossTerms(), LossTerms(label_smoothing=0.1, z_loss=1e-2)]


def logits_and_labels(rows: int, vocabulary: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocabulary, generator=generator) * scale).bfloat16()
    return logits, torch.randint(0, vocabulary, (rows,), generator=generator)


def in_c(logits: torch.Tensor, labels: torch.Tensor, terms: LossTerms, *, with_grad: bool = True):
    return cross_entropy_(logits, labels, with_grad=with_grad, label_smoothing=terms.label_smoothing,
                          z_loss=terms.z_loss)


@pytest.mark.parametrize("terms", TERMS, ids=["cross_entropy", "all_terms"])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (1, 2), (3, 37), (64, 1000), (5, 50257)])
@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, 1e-5), (torch.float32, 1e-6)])
def test_losses_and_gradients_in_c_equal_fp64(rows, vocabulary, terms, dtype, precision):
    logits, labels = logits_and_labels(rows, vocabulary)
    logits = logits.to(dtype)
    x = logits.double().requires_grad_()
    log_z = torch.logsumexp(x, 1)
    losses = log_z - x.gather(1, labels[:, None])[:, 0]
    smoothed = torch.nn.functional.cross_entropy(x, labels, reduction="sum", label_smoothing=terms.label_smoothing)
    wanted, = torch.autograd.grad(smoothed + terms.z_loss * log_z.square().sum(), x)
    untouched = logits.clone()
    evaluated, _ = in_c(untouched, labels, terms, with_grad=False)
    found_losses, found_log_z = in_c(logits, labels, terms)
    assert torch.equal(evaluated, found_losses)
    assert untouched.double().equal(x.detach())
    torch.testing.assert_close(found_losses.double(), losses.detach(), rtol=precision, atol=precision)
    torch.testing.assert_close(found_log_z.double(), log_z.detach(), rtol=precision, atol=precision)
    rounded = wanted.to(dtype).double()  # the smallest possible error
    assert (logits.double() - wanted).norm() <= 1.02 * (rounded - wanted).norm() + 1e-6 * wanted.norm()


def test_large_logits_nan_and_infinity_in_c():
    logits, labels = logits_and_labels(6, 40, scale=1e4)
    logits[1, 3], logits[2, 5], logits[3, 7] = float("nan"), float("inf"), float("-inf")
    labels[3], labels[4] = 8, 0
    logits[4] = 0
    clean = torch.tensor([0, 3, 4, 5])
    wanted = torch.nn.functional.cross_entropy(logits[clean].double(), labels[clean], reduction="none")
    losses, _ = in_c(logits, labels, LossTerms())
    torch.testing.assert_close(losses[clean].double(), wanted, rtol=1e-5, atol=1e-5)
    assert losses[1:3].isnan().all()
    assert logits[1:3].isnan().all()
    assert logits[clean].isfinite().all()
    assert logits[3, 7] == 0


@pytest.mark.parametrize("label", [-100, 40])
def test_a_label_that_the_vocabulary_lacks_is_rejected(label):
    """C would write outside of the logits. The embedding rejects each token but the last one."""
    logits, labels = logits_and_labels(3, 40)
    labels[1] = label
    before = logits.clone()
    with pytest.raises(IndexError, match="for a vocabulary of 40"):
        in_c(logits, labels, LossTerms())
    assert torch.equal(logits, before)


def test_results_in_c_do_not_depend_on_the_number_of_threads():
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            logits, labels = logits_and_labels(50, 333)
            results.append((*in_c(logits, labels, TERMS[1]), logits))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))
