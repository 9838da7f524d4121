"""Evaluate a model on data: loss per token, perplexity and bits per byte, from sums over all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pretrain.analysis.evaluate.losses import LoadedModel, Sums, load_model, sum_losses
from pretrain.analysis.evaluate.source import EvaluationSource
from pretrain.data.evaluation_windows import WindowSet
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError

_BATCH_TOKENS = 8192  # default size of a micro-batch on one rank


@dataclass(frozen=True)
class Result:
    """The losses of a model on one data set. The field names are the keys of --json.

    A value is None if it cannot be computed: the standard error of a single window, bits per byte without a tokenizer.
    """

    data: str
    seq_length: int
    stride: int
    windows: int
    tokens: int  # predicted tokens that count
    bytes: int | None  # UTF-8 bytes of the text of these tokens
    loss: float  # nats per token
    standard_error: float | None  # of the loss; the windows count as independent samples
    perplexity: float  # exp(loss)
    bits_per_byte: float | None


def result_of(windows: WindowSet, sums: Sums, text_bytes: int | None) -> Result:
    """Return the result for the sums over all windows."""
    loss = sums.loss / sums.tokens if sums.tokens else math.nan
    number, (loss_loss, loss_tokens, tokens_tokens) = len(windows), sums.squares
    standard_error = None
    if number > 1 and sums.tokens:
        # of a ratio of sums: the residual of a window is its loss minus mean loss times its tokens
        residuals = max(loss_loss - 2 * loss * loss_tokens + loss * loss * tokens_tokens, 0.0)
        standard_error = math.sqrt(residuals * number / (number - 1)) / sums.tokens
    bits = sums.loss / math.log(2) / text_bytes if text_bytes else None
    return Result(windows.name, windows.seq_length, windows.stride, number, round(sums.tokens), text_bytes, loss,
                  standard_error, _perplexity(loss), bits)


def _perplexity(loss: float) -> float:
    """Return exp(loss): infinity for a loss whose exponential is no finite number, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluate(source: EvaluationSource, sets: Sequence[WindowSet], tokenizer: Tokenizer | None, *, dtype: str,
             partition: bool, micro_batch_size: int | None) -> list[Result]:
    """Load the model, and evaluate it on each set of windows. Collective. Raises ConfigError."""
    model = load_model(source, dtype=dtype, partition=partition)
    results = []
    for windows in sets:
        size = micro_batch_size or default_batch_size(windows, _ranks())
        if (source.config.rope_scaling or {}).get("rope_type") == "dynamic":
            size = 1  # rotary frequencies of this type depend on the input's length, so windows must not be padded
        try:
            sums = sum_losses(model, windows, micro_batch_size=size, vocab_size=source.config.vocab_size)
        except torch.OutOfMemoryError:
            raise ConfigError("--micro_batch_size", problem=f"the device has too little memory for {size} samples of "
                              f"--seq_length {windows.seq_length}",
                              remedy="give a smaller one, or start more ranks with --partition_weights") from None
        results.append(result_of(windows, sums, _text_bytes(windows, tokenizer, model)))
    return results


def default_batch_size(windows: WindowSet, ranks: int) -> int:
    """Return the number of windows of a micro-batch: about 8192 tokens, and not more windows than a rank has."""
    return max(1, min(_BATCH_TOKENS // windows.seq_length, -(-len(windows) // ranks)))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _text_bytes(windows: WindowSet, tokenizer: Tokenizer | None, model: LoadedModel) -> int | None:
    """Return the UTF-8 bytes of the text that the targets encode; None without a tokenizer.

    The ranks divide the work.
    """
    if windows.text_bytes is not None:
        return windows.text_bytes
    if tokenizer is None:
        return None
    rank = dist.get_rank() if dist.is_initialized() else 0
    total = torch.tensor(windows.decoded_bytes(tokenizer, rank, _ranks()), dtype=torch.int64, device=model.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)
