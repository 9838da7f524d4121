"""Evaluate a model on data: loss per token, perplexity and bits per byte from sums over all ranks, as table or JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.analysis.evaluate.losses import LoadedModel, Sums, load_model, sum_losses
from pretrain.analysis.evaluate.token_windows import WindowSet
from pretrain.analysis.model_source import EvaluationSource
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError, counted
from pretrain.monitor.training_row import perplexity
from pretrain.terminal import aligned

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
                  standard_error, perplexity(loss), bits)


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


@dataclass(frozen=True)
class Setting:
    """Source and settings of an evaluation. The field names are the keys of --json."""

    model: str  # folder of the checkpoint or transformers model
    parameters: int
    dtype: str
    device: str
    ranks: int
    partitioned_weights: bool


def table_lines(setting: Setting, results: Sequence[Result], tasks: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines that the tool prints."""
    ranks = counted(setting.ranks, "rank")
    weights = ", weights partitioned by ZeRO-3" if setting.partitioned_weights else ""
    lines = [f"{setting.model}: {setting.parameters / 1e6:,.1f} M parameters; {setting.device}, {setting.dtype}, "
             f"{ranks}{weights}"]
    if results:
        head = ("data", "loss", "std. error", "perplexity", "bits/byte", "tokens", "bytes")
        rows = [(result.data, f"{result.loss:.4f}", _text(result.standard_error, ".4f"),
                 f"{result.perplexity:,.2f}" if result.perplexity < 1e9 else f"{result.perplexity:.3e}",
                 _text(result.bits_per_byte, ".4f"), f"{result.tokens:,}", _text(result.bytes, ","))
                for result in results]
        lines += aligned([head, *rows], num_words=1)
    if tasks:
        scores = [(name, metric, f"{value:.4f}", _text(scores.get(f"{metric}_stderr"), ".4f"))
                  for name, scores in tasks.items() for metric, value in scores.items()
                  if not metric.endswith("_stderr")]
        lines += aligned([("task", "metric", "value", "std. error"), *scores], num_words=2)
    return lines


def _text(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def write_json(path: Path, setting: Setting, results: Sequence[Result], tasks: dict[str, dict[str, Any]]) -> None:
    """Write all results into one JSON file, atomically. Values that JSON does not have (NaN, infinity) become null."""
    values = {**asdict(setting), "data": [asdict(result) for result in results], "tasks": tasks}
    try:
        write_atomically(path, json.dumps(_finite(values), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}", problem=f"the file cannot be written: {error.strerror}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
