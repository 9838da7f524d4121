"""Scores of tokens against torch's log_softmax."""

import pytest
import torch

from pretrain.model.kernels import vocabulary_shards as module
from pretrain.model.kernels.vocabulary_shards import token_scores
from pretrain.model.layers.vocabulary import TrainingLoss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, 0.0), (True, 2.0)])
def test_scores_are_those_of_all_logits(dtype: torch.dtype, with_bias: bool, softcap: float) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype)
                       for shape in ((3, module._CHUNK, 8), (50, 8), (50,)))
    labels = torch.randint(50, (3, module._CHUNK), generator=generator)
    found = token_scores(x, weight, labels, bias if with_bias else None, softcap)
    logits = torch.nn.functional.linear(x, weight, bias if with_bias else None).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = torch.log_softmax(logits, 2).gather(2, labels[..., None])[..., 0]
    torch.testing.assert_close(found.log_probs_BT, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.top1_BT, logits.argmax(2))


def test_the_loss_records_only_in_the_context() -> None:
    loss = TrainingLoss()
    x, weight, labels = torch.randn(1, 4, 8), torch.randn(50, 8), torch.arange(4)[None]
    weights = torch.full((1, 4), 0.25)
    expected = loss(x, weight, (labels, weights))
    with loss.recorded_scores() as recorded:
        assert float(loss(x, weight, (labels, weights))) == pytest.approx(float(expected), rel=1e-5)
        assert [scores.top1_BT.shape for scores in recorded] == [(1, 4)]
    loss(x, weight, (labels, weights))
    assert len(recorded) == 1
