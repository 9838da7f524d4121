"""Cross-entropy and token scores over logits whose vocabulary may be divided among tensor-parallel ranks.

`token_scores` returns the log-probability of the next token and the most likely one at each position, which evaluations
of text need. Unlike the fused loss, it keeps a result for each token, and has no gradient.

Each rank holds the logits of its own words. The ranks exchange three numbers for each token: the largest logit, the sum
of exponentials, and the logit of the label (Shoeybi et al., arXiv 1909.08053, section 3, "fused" cross-entropy).

Shapes: B batch, T positions, C tokens of a chunk, D hidden size, V words of this rank.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.distributed.parallel_groups import RankGroup
from pretrain.model.layer_memory import CHUNK_TOKENS
from pretrain.model.parallel.shared_tensors import gather
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

    def complete(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks' words side by side; collective, without a gradient."""
        widest = -(-self.vocab_size // self.group.size)
        padded = F.pad(logits_CV, (0, widest - logits_CV.shape[1]))
        parts = gather(padded, self.group, dim=0).split(len(padded))
        ranges = [split_range(self.vocab_size, replace(self.group, rank=rank)) for rank in range(self.group.size)]
        return torch.cat([part[:, :stop - start] for part, (start, stop) in zip(parts, ranges, strict=True)], 1)

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


_CHUNK = CHUNK_TOKENS // 4  # tokens; logits in fp32 then take less memory than the fused loss needs


@dataclass(frozen=True)
class TokenScores:
    """Results for the positions of a micro-batch."""

    log_probs_BT: torch.Tensor  # fp32, nats: of the label
    top1_BT: torch.Tensor  # int64: the token with the largest logit


@torch.no_grad()
def token_scores(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor,
                 bias_V: torch.Tensor | None = None, softcap: float = 0.0,
                 shard: VocabularyShard | None = None) -> TokenScores:
    """Return the scores for the logits x W^T + bias. The arguments are those of `fused_linear_cross_entropy`.

    With a `shard`, x is this rank's shard of the sequences and the labels are complete: the call is collective, and all
    ranks of the group get the same scores.
    """
    if shard is not None:
        x_BTD = gather(x_BTD, shard.group)
    log_probs, top1 = [], []
    for x_CD, labels_C in zip(x_BTD.flatten(0, 1).split(_CHUNK), labels_BT.flatten().split(_CHUNK), strict=True):
        logits_CV = F.linear(x_CD, weight_VD, bias_V).float()
        if softcap:
            logits_CV = torch.tanh(logits_CV / softcap) * softcap
        of_chunk = _scores(logits_CV, labels_C) if shard is None else _scores_over_shards(logits_CV, labels_C, shard)
        log_probs.append(of_chunk[0])
        top1.append(of_chunk[1])
    return TokenScores(torch.cat(log_probs).view_as(labels_BT), torch.cat(top1).view_as(labels_BT))


@torch.no_grad()
def scores_of_logits(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> TokenScores:
    """Return the scores for given logits."""
    chunks = zip(logits_BTV.flatten(0, 1).split(_CHUNK), labels_BT.flatten().split(_CHUNK), strict=True)
    log_probs, top1 = zip(*(_scores(logits_CV.float(), labels_C) for logits_CV, labels_C in chunks), strict=True)
    return TokenScores(torch.cat(log_probs).view_as(labels_BT), torch.cat(top1).view_as(labels_BT))


def _scores(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at_label_C = logits_CV.gather(1, labels_C[:, None])[:, 0]
    return at_label_C - logits_CV.logsumexp(1), logits_CV.argmax(1)


def _scores_over_shards(logits_CV: torch.Tensor, labels_C: torch.Tensor,
                        shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores over the complete vocabulary; collective. Of equal logits, the first word's is the largest."""
    rows_C, inside_C = shard.local(labels_C)
    own_C, word_C = logits_CV.max(1)
    largest_C = own_C.clone()
    dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=shard.group.handle)
    top1_C = torch.where(own_C == largest_C, word_C + shard.words[0], shard.vocab_size)
    dist.all_reduce(top1_C, op=dist.ReduceOp.MIN, group=shard.group.handle)
    sums = torch.stack([torch.exp(logits_CV - largest_C[:, None]).sum(1),
                        logits_CV.gather(1, rows_C[:, None])[:, 0].masked_fill_(~inside_C, 0.0)])
    dist.all_reduce(sums, group=shard.group.handle)
    return sums[1] - largest_C - sums[0].log(), top1_C
