"""Passes of a training engine over chosen samples of its data: losses, gradients without an update, and trial steps.

Afterwards the engine is as before, bit for bit: its state is saved first and loaded at the end, as a rollback does.

Shapes: N sequences, T tokens, B micro-batch size.
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad

from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch, tokens_of
from pretrain.data.samples.read_order import ReadOrder
from pretrain.distributed.collectives import from_rank_0, gather
from pretrain.engine.attachments import attachments
from pretrain.engine.examine import layer_of, norm_of_all_parts, train_without_overflow
from pretrain.engine.steps import (
    data_parallel_rank,
    data_parallel_size,
    grad_norm,
    loss_scale,
    open_loader,
    train_batch,
)
from pretrain.engine.token_scores import score_tokens
from pretrain.engine.update_guard import UpdateGuard

_SAVED = "examined"  # folder of the saved state, in the run folder of the replay


@dataclass(frozen=True)
class Batch:
    """The samples of a global batch, all of them on each rank. Sample i has the sequences [i * parts, (i + 1) * parts).
    """

    ids: list[int]  # places of the samples in the order of the data
    tokens_NT: torch.Tensor
    labels_NT: torch.Tensor
    weights_NT: torch.Tensor  # weights of the loss; only their proportions matter
    positions_NT: torch.Tensor | None  # None: no document attention
    rows: int  # sequences of a micro-batch

    @property
    def parts(self) -> int:
        """Sequences of a sample: more than one while --seq_length_schedule divides the samples."""
        return len(self.tokens_NT) // len(self.ids)


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean loss over some samples."""

    loss: float
    norm: float
    norms: dict[str, float]  # norms of each parameter, by name; empty: not asked for


class SamplePasses:
    """Passes of the engine over samples. All methods are collective and return the same values on all ranks.

    `before`: is called before each pass, so that the watchdog sees progress.
    """

    def __init__(self, engine: DeepSpeedEngine, plan: Plan, before: Callable[[], None]) -> None:
        self._engine, self._plan, self._before = engine, plan, before

    def batch(self, consumed_samples: int) -> Batch:
        """Return the samples of the step at a data position."""
        loader = open_loader(self._engine, self._plan, "train", is_divided=False)
        batches = loader.step(consumed_samples)
        loader.close()
        tokens_NT = torch.cat([tokens_of(batch) for batch in batches])
        positions = [batch[0][1] for batch in batches if isinstance(batch[0], tuple)]
        number = len(batches) * loader.micro_batch_size
        ids = self._plan.read_order.ids(range(consumed_samples, consumed_samples + number)).tolist()
        return Batch(ids, tokens_NT, torch.cat([labels_BT for _, (labels_BT, _) in batches]),
                     torch.cat([weights_BT for _, (_, weights_BT) in batches]).float().cpu(),
                     torch.cat(positions) if positions else None, len(batches[0][1][0]))

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each label, [N, T] on the CPU; of labels that do not count 0. In evaluation mode."""
        self._before()
        log_probs_NT, _ = score_tokens(
            self._engine, batch.tokens_NT, batch.labels_NT,
            document_end=self._plan.eod_token if self._plan.args.document_attention else None)
        return torch.where(batch.weights_NT > 0, -log_probs_NT, 0.0)

    def gradient(self, batch: Batch, samples: Sequence[int] | None = None, *, by_parameter: bool = False) -> Gradient:
        """Return the gradient of the mean loss over these samples of the batch, or over all, before clipping."""
        self._before()
        norms: dict[str, float] = {}

        def read() -> None:
            scale = loss_scale(self._engine)
            for name, parameter in self._engine.module.named_parameters():
                gradient = safe_get_full_grad(parameter) if by_parameter and parameter.requires_grad else None
                if gradient is not None:
                    norms[name] = norm_of_all_parts(self._engine, parameter, gradient) / scale

        chosen = range(len(batch.ids)) if samples is None else samples
        with self._without_updates(read):
            loss, _ = train_without_overflow(self._engine, self._micro_batches(batch, chosen))
        merged = {name: value for of_rank in gather(norms) for name, value in of_rank.items()} if by_parameter else {}
        return Gradient(loss, grad_norm(self._engine), merged)

    def train(self, consumed_samples: int, steps: int, order: ReadOrder) -> list[tuple[float, float]]:
        """Train steps from a data position of this order on. Returns loss and gradient norm of each."""
        loader = open_loader(self._engine, self._plan, "train", order=order)
        rows = []
        for _ in range(steps):
            self._before()
            loss = float(train_batch(self._engine, loader.step(consumed_samples)))
            rows.append((loss, grad_norm(self._engine)))
            consumed_samples += self._plan.length.batch_sizes.at(consumed_samples)
        loader.close()
        return rows

    @contextlib.contextmanager
    def restored(self, step: int, consumed_samples: int) -> Iterator[Callable[[], None]]:
        """Save the state after `step`, and load it after the block. Yields a function that loads it before that."""
        folder = Path(self._plan.args.save) / _SAVED
        saved = save_checkpoint(self._engine, self._plan, folder, step=step, consumed_samples=consumed_samples,
                                versions={})

        def load() -> None:
            self._before()
            load_checkpoint(self._engine, self._plan, saved.folder, saved.manifest)

        yield load
        load()
        dist.barrier()
        from_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))

    @contextlib.contextmanager
    def _without_updates(self, before_update: Callable[[], None]) -> Iterator[None]:
        """Skip every update in the block, and call `before_update` once the gradients are reduced."""
        engine, guard = self._engine, attachments(self._engine).update.find(UpdateGuard)
        assert guard is not None
        take_step = engine._take_model_step

        def observed_step(*args: Any, **kwargs: Any) -> Any:
            before_update()
            return take_step(*args, **kwargs)

        engine._take_model_step = observed_step
        try:
            with guard.rejecting_all():
                yield
        finally:
            engine._take_model_step = take_step

    def _micro_batches(self, batch: Batch, samples: Sequence[int]) -> list[MicroBatch]:
        """Return this rank's micro-batches of samples; those that fill the last ones have no weight."""
        rank, ranks = data_parallel_rank(self._engine), data_parallel_size(self._engine)
        rows = torch.tensor([sample * batch.parts + part for sample in samples for part in range(batch.parts)])
        steps = math.ceil(len(rows) / (batch.rows * ranks))
        padded = torch.cat([rows, rows[:1].repeat(steps * ranks * batch.rows - len(rows))])
        weights_NT = batch.weights_NT[padded].clone()
        weights_NT[len(rows):] = 0
        weights_NT *= steps * ranks / weights_NT.sum().clamp(min=1e-30)
        batches: list[MicroBatch] = []
        for step in range(steps):
            own = slice((step * ranks + rank) * batch.rows, (step * ranks + rank + 1) * batch.rows)
            tokens_BT = batch.tokens_NT[padded[own]]
            inputs = tokens_BT if batch.positions_NT is None else (tokens_BT, batch.positions_NT[padded[own]])
            batches.append((inputs, (batch.labels_NT[padded[own]], weights_NT[own].contiguous())))
        return batches


def by_layer(norms: dict[str, float]) -> dict[str, float]:
    """Return the norm of the gradients of each layer, from those of its parameters."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + norm**2
    return {name: math.sqrt(square) for name, square in squares.items()}
