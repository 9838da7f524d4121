"""Label smoothing and z-loss in the fused loss, compared with torch's operators and autograd."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels.fused_loss import LossTerms, carry
from pretrain.model.layer_specs import as_module
from pretrain.model.layers.vocabulary import TrainingLoss
from tests.model.test_operators import HEADS, loss_inputs, plain_logits, small_chunks
from tests.support.reference_loss import linear_cross_entropy
from tests.support.tensors import relative_error, saved_by

__all__ = ["small_chunks"]  # a fixture
TERMS = pytest.mark.parametrize("terms", [LossTerms(), LossTerms(0.1), LossTerms(0.0, 0.3), LossTerms(0.2, 0.05),
                                          LossTerms(1.0)],
                                ids=["cross_entropy", "smoothing", "z_loss", "both", "only_smoothing"])


def reference(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """Return the loss with all terms, by torch's own cross-entropy."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none",
                             label_smoothing=terms.label_smoothing)
    losses = losses + terms.z_loss * torch.logsumexp(logits.flatten(0, 1), 1) ** 2
    return (losses * weights.flatten()).sum()


@HEADS
@TERMS
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "scale", "tolerance"), [
    (torch.float64, 1.0, 1e-12), (torch.float32, 1.0, 1e-6), (torch.bfloat16, 1.0, 2e-2),
    (torch.float16, 65536.0, 3e-3)])
def test_gradients_equal_those_of_torch_s_loss(dtype, scale, tolerance, terms, with_bias, softcap):
    """Chunks, a soft-cap, masked tokens and unequal weights; the value is the cross-entropy alone."""
    x, weight, labels, weights, bias = loss_inputs(dtype)
    inputs = (x, weight, bias) if with_bias else (x, weight)
    precise = torch.promote_types(dtype, torch.float32)
    weights = weights.to(precise)
    mine = linear_cross_entropy(x, weight, (labels, weights), *inputs[2:], softcap=softcap, terms=terms)
    logits = plain_logits(*(tensor.to(precise) for tensor in inputs), *((None,) if not with_bias else ()), softcap)
    wanted = torch.autograd.grad(reference(logits, labels, weights, terms) * scale, inputs)
    for mine_grad, grad in zip(torch.autograd.grad(mine * scale, inputs), wanted, strict=True):
        assert mine_grad.dtype == dtype
        assert relative_error(mine_grad, grad) < tolerance
    cross_entropy = reference(logits, labels, weights, LossTerms()).item()
    assert mine.dtype == precise
    assert mine.item() == pytest.approx(cross_entropy, rel=max(tolerance, 1e-6))


@TERMS
def test_a_carried_and_tied_head_has_the_same_gradients(terms):
    """The matrix is the embedding too, as in a model with tied embeddings."""
    _, weight, labels, weights, _ = loss_inputs(torch.float64)
    weights = weights.double()
    x = F.embedding(labels, weight).tanh()
    (wanted,) = torch.autograd.grad(reference(F.linear(x, weight), labels, weights, terms), weight, retain_graph=True)
    loss = linear_cross_entropy(carry(x, weight), weight, (labels, weights), terms=terms)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), (wanted,))


def test_terms_save_no_more_tensors_and_do_not_affect_evaluation():
    x, weight, labels, weights, _ = loss_inputs(torch.bfloat16, vocab=5000)
    terms = LossTerms(0.1, 1e-4)
    _, plain = saved_by(linear_cross_entropy, x, weight, (labels, weights))
    _, saved = saved_by(linear_cross_entropy, x, weight, (labels, weights), None, 0.0, terms)
    assert [(t.shape, t.dtype) for t in saved] == [(t.shape, t.dtype) for t in plain]
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, (labels, weights), terms=terms),
                           linear_cross_entropy(x, weight, (labels, weights)))


@pytest.mark.parametrize("tied", [False, True])
def test_the_module_trains_with_the_terms_and_evaluates_without(tied):
    terms = LossTerms(0.1, 0.01)
    config = load_model_config("tiny", f"n_layer=1,n_embd=16,n_head=2,vocab_size=32,tie_word_embeddings={tied}")
    modules = [as_module(config), as_module(config, loss_terms=terms)]
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(32, (2, 2, 8), generator=generator)
    weights = torch.rand(2, 8, generator=generator)
    for module in modules:
        initialize_parameters(module, config, seed=1)
    plain, full = modules
    loss = full(tokens, labels, weights)
    loss.backward()
    logits = plain(tokens)
    reference(logits, labels, weights, terms).backward()
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in full.named_parameters()]
    for mine, other in zip(full.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert loss.item() == pytest.approx(reference(logits, labels, weights, LossTerms()).item(), rel=1e-5)
    squares = (torch.logsumexp(logits, -1) ** 2 * weights).sum().item()
    assert full.training_loss.take_squares().item() == pytest.approx(squares, rel=1e-5)
    with torch.no_grad():
        full(tokens, labels, weights)
    assert full.training_loss.take_squares() is None  # an evaluation is not counted


def test_squares_are_a_mean_over_micro_batches():
    loss = TrainingLoss(LossTerms(z_loss=1e-4))
    x, weight, labels, weights, _ = loss_inputs(torch.float32)
    for factor in (1.0, 3.0):
        loss(x, weight, (labels, weights * factor))
    squares = (torch.logsumexp(F.linear(x, weight), -1) ** 2 * weights).sum().item()
    assert loss.take_squares().item() == pytest.approx(2 * squares, rel=1e-5)
