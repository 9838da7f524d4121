"""Cross-entropy over logits whose vocabulary is divided among tensor-parallel ranks.

Each rank holds the logits of its own words. The ranks exchange three numbers for each token: the largest logit, the sum
of exponentials, and the logit of the label (Shoeybi et al., arXiv 1909.08053, section 3, "fused" cross-entropy).

Shapes: C tokens, V words of this rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.distributed.parallel_groups import RankGroup
from pretrain.model.parameters import split_range


@dataclass(frozen=True)
class VocabularyShard:
    """The words of a rank: a range of the complete vocabulary."""

    group: RankGroup
    vocab_size: int  # of the complete vocabulary

    @property
    def words(self) -> tuple[int, int]:
        """First word of this rank, and the end of its range."""
        return split_range(self.vocab_size, self.group)

    def local(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each word in this rank's matrix, and whether the rank has it; otherwise the row is 0."""
        start, stop = self.words
        inside = (words >= start) & (words < stop)
        return (words - start).masked_fill_(~inside, 0), inside

    def embed(self, tokens_BT: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Return [B, T, D] with the embeddings of this rank's words, and 0 for other words."""
        rows, inside = self.local(tokens_BT)
        return F.embedding(rows, weight_VD).masked_fill(~inside[..., None], 0.0)


def cross_entropy_over_shards_(logits_CV: torch.Tensor, labels_C: torch.Tensor, shard: VocabularyShard, *,
                               with_grad: bool, softcap: float = 0.0, label_smoothing: float = 0.0,
                               z_loss: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropies and the logsumexps over the complete vocabulary, [C] each; collective.

    With `with_grad`, overwrite this rank's logits with their gradient: see fused_loss.py for the formulas.
    """
    precise = torch.promote_types(logits_CV.dtype, torch.float32)
    capped = logits_CV.to(precise)
    if softcap:
        capped = torch.tanh(capped / softcap) * softcap
    rows, inside = shard.local(labels_C)
    largest = capped.amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group.handle)
    p = torch.exp(capped - largest[:, None])
    sums = torch.stack([p.sum(1), capped.gather(1, rows[:, None])[:, 0].masked_fill_(~inside, 0.0)])
    dist.all_reduce(sums, group=shard.group.handle)
    log_z = largest + sums[0].log()
    if with_grad:
        p.mul_(((1 + 2 * z_loss * log_z) / sums[0])[:, None])
        if label_smoothing:
            p.sub_(label_smoothing / shard.vocab_size)
        p.scatter_add_(1, rows[:, None], (label_smoothing - 1) * inside[:, None].to(p.dtype))
        if softcap:
            p.mul_(1 - (capped / softcap).square_())
        logits_CV.copy_(p)
    return log_z - sums[1], log_z
