"""Load a model for evaluation, complete on each rank or partitioned by ZeRO-3, and sum its losses over windows.

Shapes: B batch, T sequence length.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from pretrain.analysis.evaluate.token_windows import WindowSet
from pretrain.analysis.model_source import EvaluationSource
from pretrain.checkpoint.format.shard_index import FP32
from pretrain.checkpoint.load.load_checkpoint import open_checkpoint
from pretrain.checkpoint.load.reader import WeightsReader, open_weights
from pretrain.data.loader import document_positions
from pretrain.engine.build import deepspeed_output
from pretrain.engine.patches.zero import keep_dtype_of_partitions
from pretrain.model.config import ModelConfig
from pretrain.model.layer_specs import as_module
from pretrain.model.parameters import DTYPES, check_dtype
from pretrain.terminal import clear_status, status

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
