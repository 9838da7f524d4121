"""Evaluate a model on data: loss per token, perplexity and bits per byte from sums over all ranks, as table or JSON.

The model is complete on each rank, or partitioned by ZeRO-3. Shapes: B batch, T sequence length.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from pretrain.analysis.evaluate.token_windows import WindowSet
from pretrain.analysis.model_source import EvaluationSource
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.checkpoint.format.shard_index import FP32
from pretrain.checkpoint.load.load_checkpoint import open_checkpoint
from pretrain.checkpoint.load.reader import WeightsReader, open_weights
from pretrain.data.loader import document_positions
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.engine.build import deepspeed_output
from pretrain.engine.patches.zero import keep_dtype_of_partitions
from pretrain.errors import ConfigError, counted, file_errors
from pretrain.model.config import ModelConfig
from pretrain.model.layer_specs import as_module
from pretrain.model.parameters import DTYPES, check_dtype
from pretrain.monitor.training_row import perplexity
from pretrain.terminal import aligned, clear_status, status

_BATCH_TOKENS = 8192  # default size of a micro-batch on one rank
_STATUS_SECONDS = 10.0  # between two status lines

LossOfRows = Callable[..., torch.Tensor]
"""Maps tokens_BT, labels_BT, weights_BT and, with document attention, positions_BT to the weighted sum of the losses of
each row, [B] fp32."""


class RowLosses(nn.Module):
    """The model with its loss, summed over each row of a batch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = as_module(config)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor, weights_BT: torch.Tensor,
                positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        return self.model.row_losses(tokens_BT, labels_BT, weights_BT, positions_BT)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on this rank's device."""

    losses_of_rows: LossOfRows
    device: torch.device
    partitioned: bool


@dataclass(frozen=True)
class Sums:
    """Sums over the windows of a data set and over all ranks. Losses are in nats.

    `squares` has the sums of loss^2, loss * tokens and tokens^2 of the windows, for the standard error.
    """

    loss: float
    tokens: float
    squares: tuple[float, float, float]


def load_model(source: EvaluationSource, *, dtype: str, partition: bool) -> LoadedModel:
    """Load all weights, or with `partition` this rank's part of each weight; collective. Raises ConfigError."""
    reader = open_checkpoint(source.folder) if source.hf_folder is None and dist.is_initialized() else \
        open_weights(source.hf_folder or source.folder)
    device = torch.device(get_accelerator().current_device_name())
    ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
                 **({dtype: {"enabled": True}} if dtype != "fp32" else {})}
    keep_dtype_of_partitions()
    with _default_dtype(DTYPES[dtype]), deepspeed_output("error"):
        if partition:
            with deepspeed.zero.Init(config_dict_or_path=ds_config, dtype=DTYPES[dtype]):
                module = RowLosses(source.config)
        else:
            with device:
                module = RowLosses(source.config)
        _fill(module.model, reader)
        module.eval()
        check_dtype(module, dtype)
        if not partition:
            return LoadedModel(module, device, False)
        engine, *_ = deepspeed.initialize(model=module, config=ds_config)
    engine.eval()
    return LoadedModel(engine, device, True)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _fill(model: nn.Module, reader: WeightsReader) -> None:
    """Copy the weights into the model, one tensor at a time."""
    shapes = {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in model.named_parameters()}
    reader.check_shapes(shapes)
    for name, weight in model.named_parameters():
        if not hasattr(weight, "ds_tensor"):
            reader.copy(name, FP32, 0, weight.data)
            continue
        # DeepSpeed 0.19.8 (runtime/zero/partition_parameters.py, _partition_param): equal parts, the last one padded
        part = weight.ds_tensor
        start = dist.get_rank() * part.numel()
        count = min(part.numel(), math.prod(shapes[name]) - start)
        if count > 0:
            reader.copy(name, FP32, start, part.data.view(-1)[:count])


@torch.no_grad()
def sum_losses(model: LoadedModel, windows: WindowSet, *, micro_batch_size: int, vocab_size: int) -> Sums:
    """Sum the losses of all windows. The ranks divide the windows; each makes the same number of forward calls.

    A token without context has the loss of a uniform distribution, ln(vocab_size).
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    totals = torch.zeros(5, dtype=torch.float64, device=model.device)
    global_batch = micro_batch_size * ranks
    batches = -(-len(windows) // global_batch)
    order, shown = windows.by_length(), -math.inf
    for number in range(batches):
        if time.monotonic() - shown >= _STATUS_SECONDS:
            status(f"evaluating {windows.name}: {number * global_batch:,} of {len(windows):,} windows")
            shown = time.monotonic()
        first = number * global_batch + rank * micro_batch_size
        indices = order[first:first + micro_batch_size].tolist()
        loss_B, tokens_B = _losses_of_batch(model, windows, indices, micro_batch_size, vocab_size)
        totals += torch.stack((loss_B, tokens_B, loss_B * loss_B, loss_B * tokens_B, tokens_B * tokens_B)).sum(1)
    clear_status()
    if ranks > 1:
        dist.all_reduce(totals)
    loss, tokens, *squares = totals.tolist()
    return Sums(loss, tokens, (squares[0], squares[1], squares[2]))


def _losses_of_batch(model: LoadedModel, windows: WindowSet, indices: Sequence[int], rows: int,
                     vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss and the number of tokens of each of these windows, [B] fp64 with B = `rows`.

    Rows without a window count nothing: they make this rank's forward calls as many as other ranks make.
    """
    arrays: tuple[Any, ...] = windows.batch(indices, rows)
    if windows.document_end is not None:
        arrays = *arrays, document_positions(arrays[0], windows.document_end)
    tokens_BT, labels_BT, weights_BT, alone_B, *positions = (torch.from_numpy(x).to(model.device) for x in arrays)
    loss_B = model.losses_of_rows(tokens_BT, labels_BT, weights_BT, *positions).double()
    loss_B += alone_B.double() * math.log(vocab_size)
    return loss_B, weights_BT.sum(1, dtype=torch.float64) + alone_B


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
    standard_error: float | None  # standard error of the loss; the windows count as independent samples
    perplexity: float  # exp(loss)
    bits_per_byte: float | None


def result_of(windows: WindowSet, sums: Sums, text_bytes: int | None) -> Result:
    """Return the result for the sums over all windows."""
    loss = sums.loss / sums.tokens if sums.tokens else math.nan
    number, (loss_loss, loss_tokens, tokens_tokens) = len(windows), sums.squares
    standard_error = None
    if number > 1 and sums.tokens:
        # the standard error of a ratio of sums: the residual of a window is its loss minus mean loss times its tokens
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
    with file_errors(f"--json {path}", "the file cannot be written: {}"):
        write_atomically(path, json.dumps(_finite(values), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
