"""Scores of given tokens and greedy continuations, computed by the engine that trains, in every layout.

All ranks call these functions with the same arguments, and get the same results. They run the same forward passes as an
evaluation: no dropout, and no effect on weights, optimizer, loss scale, random generators and data position.

Shapes: N sequences, T tokens.
"""

from collections.abc import Callable

import torch
from deepspeed import DeepSpeedEngine

from pretrain.data.loader import MicroBatch, document_positions
from pretrain.engine.attachments import attachments
from pretrain.engine.steps import data_parallel_rank, data_parallel_size, eval_batch, tensor_parallel_size


def score_tokens(engine: DeepSpeedEngine, tokens_NT: torch.Tensor, labels_NT: torch.Tensor, *,
                 document_end: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each label after the tokens up to its position, and the most likely token there.

    Collective. The data-parallel ranks divide the sequences.

    Args:
        tokens_NT: int64 on the CPU. Sequences that are shorter than T end in any tokens: no earlier position sees them.
        labels_NT: int64, the token that follows each one.
        document_end: with document attention, the token that ends a document.

    Returns:
        Log-probabilities (fp32, nats) and tokens (int64), [N, T] each, on the CPU of every rank.
    """
    own, (sequences, length) = attachments(engine), tokens_NT.shape
    ranks, rank = data_parallel_size(engine), data_parallel_rank(engine)
    size = min(engine.train_micro_batch_size_per_gpu(), -(-sequences // ranks))
    shards = tensor_parallel_size(engine) * engine.module.sequence.size
    padded = -(-length // shards) * shards
    if own.only_shape is not None:
        size, padded = own.only_shape
    steps = -(-sequences // (size * ranks))
    columns = [torch.nn.functional.pad(x, (0, padded - length, 0, steps * ranks * size - sequences))
               for x in (tokens_NT, labels_NT)]
    starts = [(step * ranks + rank) * size for step in range(steps)]
    batches = [_micro_batch([column[start:start + size] for column in columns], document_end) for start in starts]
    with engine.module.training_loss.recorded_scores() as recorded:
        eval_batch(engine, batches)
    results = torch.zeros(3, steps * ranks * size, padded, dtype=torch.float64, device=engine.device)
    for start, scores in zip(starts, recorded, strict=False):  # none on pipeline stages without the head
        positions = scores.top1_BT.shape[1]
        first = engine.module.sequence.rank * positions if positions < padded else 0
        results[:, start:start + size, first:first + positions] = torch.stack(
            [scores.log_probs_BT.double(), scores.top1_BT.double(), torch.ones_like(scores.log_probs_BT.double())])
    torch.distributed.all_reduce(results)
    log_probs, top1, copies = results[:, :sequences, :length].cpu()
    return (log_probs / copies).float(), (top1 / copies).round().long()


def _micro_batch(columns: list[torch.Tensor], document_end: int | None) -> MicroBatch:
    tokens_BT, labels_BT = columns
    labels = labels_BT, torch.ones(labels_BT.shape)
    if document_end is None:
        return tokens_BT, labels
    return (tokens_BT, torch.from_numpy(document_positions(tokens_BT.numpy(), document_end))), labels


def continue_greedily(engine: DeepSpeedEngine, prompts_NT: torch.Tensor, new_tokens: int, *,
                      document_end: int | None = None, before: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Return the `new_tokens` tokens with which the model continues each prompt if it always takes the most likely one.

    Collective. The tokens are guessed, and all positions after the prompt are computed at once until no guess changes:
    then each token is the most likely one after those before it. This takes at most `new_tokens` forward passes,
    and fewer for texts that repeat themselves.

    Returns:
        int64 [N, new_tokens] on the CPU of every rank.
    """
    prompt = prompts_NT.shape[1]
    guess = torch.zeros(len(prompts_NT), new_tokens, dtype=torch.int64)
    for _ in range(new_tokens):
        before()
        tokens_NT = torch.cat([prompts_NT, guess], 1)[:, :-1]
        _, top1_NT = score_tokens(engine, tokens_NT, torch.zeros_like(tokens_NT), document_end=document_end)
        found = top1_NT[:, prompt - 1:]
        if torch.equal(found, guess):
            break
        guess = found
    return guess
