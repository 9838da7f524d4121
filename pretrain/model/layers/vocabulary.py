"""Layers whose matrices have a row for each word or position (embeddings, head), and the loss that the head computes.

Under tensor parallelism each rank has a range of the words, and the tensors between the layers are shards of the
sequences. The embeddings of all ranks are summed and scattered; the head gathers the sequences.

Shapes: B batch, T positions, D hidden size, V vocabulary (of this rank).
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import Layer, ModelConfig, Parameters, inside
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.fused_loss import (
    CROSS_ENTROPY,
    LossTerms,
    carry,
    fused_linear_cross_entropy,
    loss_of_logits,
)
from pretrain.model.kernels.vocabulary_shards import TokenScores, VocabularyShard, scores_of_logits, token_scores
from pretrain.model.parallel.shared_tensors import gather, own_shard, sum_and_scatter, summed_gradients
from pretrain.model.parameters import create_parameters

Labels = tuple[torch.Tensor, torch.Tensor]
"""(labels_BT int64, weights_BT float32); a masked token has weight 0 and any valid label"""


class TrainingLoss:
    """Weighted cross-entropy with additional terms. It averages the squared logsumexps until the next `take_squares`.

    The additional terms affect the gradients only. Evaluation and logged training losses are cross-entropies, which can
    be compared between runs with different terms.
    """

    def __init__(self, terms: LossTerms = CROSS_ENTROPY, *, plain_operators: bool = False) -> None:
        self.terms, self.plain_operators = terms, plain_operators
        self._squares: torch.Tensor | None = None  # weighted sum over the tokens of `_micro_batches` micro-batches
        self._micro_batches = 0
        self._recorded: list[TokenScores] | None = None  # of the micro-batches, within `recorded_scores`

    @contextlib.contextmanager
    def recorded_scores(self) -> Iterator[list[TokenScores]]:
        """Yield a list that gets the scores of each micro-batch whose loss is computed in this context.

        It remains empty on pipeline stages without the head. Under sequence parallelism the scores are those of this
        rank's positions.
        """
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def __call__(self, x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels: Labels,
                 bias: torch.Tensor | None = None, softcap: float = 0.0,
                 shard: VocabularyShard | None = None) -> torch.Tensor:
        """Return the sum of weight * cross-entropy over the tokens, for the logits x W^T + bias: an fp32 scalar.

        The sum is not divided: the weights contain the normalization (data/loader.py, Loader).

        Args:
            softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
            shard: of the vocabulary, see `fused_linear_cross_entropy`.
        """
        labels_BT, weights_BT = labels
        if self._recorded is not None:
            self._recorded.append(token_scores(x_BTD, weight_VD, labels_BT, bias, softcap, shard))
            return -(self._recorded[-1].log_probs_BT * weights_BT).sum()
        loss, squares = fused_linear_cross_entropy(x_BTD, weight_VD, labels_BT, weights_BT, bias, softcap, self.terms,
                                                   self.plain_operators, shard)
        self._add_squares(loss, squares)
        return loss

    def of_logits(self, logits_BTV: torch.Tensor, labels: Labels) -> torch.Tensor:
        """Return the same sum for given logits, whose softmax is computed in fp32."""
        labels_BT, weights_BT = labels
        if self._recorded is not None:
            self._recorded.append(scores_of_logits(logits_BTV, labels_BT))
            return -(self._recorded[-1].log_probs_BT * weights_BT).sum()
        loss, squares = loss_of_logits(logits_BTV, labels_BT, weights_BT, self.terms)
        self._add_squares(loss, squares)
        return loss

    def _add_squares(self, loss: torch.Tensor, squares: torch.Tensor) -> None:
        if self.terms.z_loss and loss.requires_grad:
            self._squares = squares if self._squares is None else self._squares + squares
            self._micro_batches += 1

    def take_squares(self) -> torch.Tensor | None:
        """Return the mean squared logsumexp of the training micro-batches since the last call; None without any.

        Averaged over the data-parallel ranks, it is the mean over all tokens, as for the losses.
        """
        mean = None if self._squares is None else self._squares / self._micro_batches
        self._squares, self._micro_batches = None, 0
        return mean


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Limit the logits to (-cap, cap): cap * tanh(logits / cap); a cap of 0 means no limit."""
    return torch.tanh(logits / cap) * cap if cap else logits


def _vocabulary_shard(config: ModelConfig, groups: ParallelGroups) -> VocabularyShard | None:
    return VocabularyShard(groups.tensor, config.vocab_size) if groups.tensor.size > 1 else None


class OutputLinear(nn.Module):
    """Output matrix [V, D] of a model without tied embeddings."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, config: ModelConfig, parameters: Parameters, loss: TrainingLoss | None = None,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.shard = _vocabulary_shard(config, groups)
        create_parameters(self, parameters, groups, optional="bias")
        self.softcap, self.loss = config.logit_softcap, loss or TrainingLoss()

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Return the logits [B, T, V], of this rank's words, or with labels the loss."""
        if labels is not None:
            return self.loss(x_BTD, self.weight, labels, bias=self.bias, softcap=self.softcap, shard=self.shard)
        return soft_cap(F.linear(_complete(x_BTD, self.shard), self.weight, self.bias), self.softcap)


def _complete(x_BTD: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """Return the complete sequences."""
    return x_BTD if shard is None else gather(x_BTD, shard.group)


class TokenEmbedding(nn.Module):
    """One matrix [V, D] that maps tokens to hidden states and, if tied, hidden states to logits or loss.

    All uses go through `forward`, because ZeRO-3 gathers a partitioned weight when its module is called.
    """

    embedding: torch.Tensor

    def __init__(self, config: ModelConfig, layer: Layer, loss: TrainingLoss | None = None,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.shard = _vocabulary_shard(config, groups)
        create_parameters(self, layer.by_name(), groups)
        self.scale, self.softcap, self.loss = config.embedding_scale, config.logit_softcap, loss or TrainingLoss()
        # PositionEmbedding applies the dropout of learned positions
        self.dropout = nn.Dropout(config.embedding_dropout if config.position != "learned" else 0.0)

    def forward(self, x: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Map int [B, T] to [B, T, D], and floating [B, T, D] to logits [B, T, V], or with labels to the loss."""
        if labels is not None:
            return self.loss(x, self.embedding, labels, softcap=self.softcap, shard=self.shard)
        if x.is_floating_point():
            return soft_cap(F.linear(_complete(x, self.shard), self.embedding), self.softcap)
        embedded_BTD = self._embed(x)
        if self.scale != 1.0:  # rounded to the weight's dtype, as in transformers
            embedded_BTD = embedded_BTD * torch.tensor(self.scale, dtype=self.embedding.dtype, device="cpu")
        return self.dropout(embedded_BTD)

    def _embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        if self.shard is None:
            return F.embedding(tokens_BT, self.embedding)
        return sum_and_scatter(self.shard.embed(tokens_BT, self.embedding), self.shard.group)


class PositionEmbedding(nn.Module):
    """Add learned positions, then apply the dropout of the embeddings."""

    embedding: torch.Tensor

    def __init__(self, config: ModelConfig, layer: Layer, groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.tensor = groups.tensor
        self.shards = groups.tensor if groups.tensor.size > 1 else groups.sequence  # the ranks that share sequences
        create_parameters(self, layer.by_name(), groups)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        with summed_gradients(self, self.tensor):
            if documents is None:
                positions = own_shard(self.embedding[: x_BTD.shape[1] * self.shards.size], self.shards, dim=0)
            else:
                positions = F.embedding(own_shard(documents.positions_BT, self.shards), self.embedding)
            return self.dropout(x_BTD + positions)


class Head(nn.Module):
    """Head of a model without tied embeddings: logits [B, T, V], or with labels the loss."""

    def __init__(self, config: ModelConfig, layer: Layer, loss: TrainingLoss | None = None,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.lm_head = OutputLinear(config, inside(layer.by_name(), "lm_head"), loss, groups)

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        output: torch.Tensor = self.lm_head(x_BTD, labels)
        return output


class LossHead(Head):
    """Last layer of a pipeline. Without labels it returns its input; the loss function calls it again with labels."""

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        if labels is None:
            return carry(x_BTD, self.lm_head.weight, self.lm_head.bias)
        return super().forward(x_BTD, labels)


def tied_head(embedding: nn.Module, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
    """Compute the head of a tied model: logits, or with labels the loss."""
    output: torch.Tensor = embedding(x_BTD, labels)
    return output


def tied_loss_head(embedding: nn.Module, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
    """Compute the last layer of a pipeline with a tied head; see LossHead."""
    if labels is None:
        return carry(x_BTD, embedding.get_parameter("embedding"))
    return tied_head(embedding, x_BTD, labels)
