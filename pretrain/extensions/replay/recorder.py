"""FlightRecorder: takes the digests of each step on this rank, and appends its row to the files of the record.

It changes no value of the training. On a device, values are copied asynchronously, and the row of a step is written
after the next step.
"""

import contextlib
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

from pretrain.callback import Callback, Run, StepResult
from pretrain.checkpoint.format.fragments import held_states
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import from_rank_0
from pretrain.engine.attachments import attachments
from pretrain.engine.checksums import combined_checksum, held_parameters
from pretrain.engine.examine import layer_of
from pretrain.engine.parallelism import rank_order
from pretrain.engine.steps import global_grad_norm, loss_scale, rank_loss
from pretrain.engine.update_guard import SkippedUpdate, begin_skipped_update
from pretrain.extensions.replay.extension import RECORD_FILE
from pretrain.extensions.replay.first_micro_batch import random_states
from pretrain.extensions.replay.layer_digests import CostTimer, FlightInterval, LayerDigests, ReducedDigest
from pretrain.extensions.replay.record_files import Header, RecordFile, kept_folder, prune_starts, start_folder
from pretrain.monitor.read_run_folder import newest_start_number

if TYPE_CHECKING:
    from pretrain.resilience.requests import Request

SPIKE, REQUEST = "spike", "request"  # reasons to keep a copy of the record
_MOST_SPIKES = 10  # copies of one start
_SCALARS = ("loss", "rank_loss", "grad_norm")


@dataclass
class _Unwritten:
    """The row of a step whose values on the device are still being copied to the host."""

    row: dict[str, Any]
    names: dict[str, list[str] | None]  # key -> names of its values, or None for a list; of the checksums
    scalars: torch.Tensor  # fp64: loss, loss of the rank, gradient norm, then the norms of the layers' gradients
    sums: torch.Tensor  # int64, one after the other in the order of `names`
    skipped: Callable[[float], SkippedUpdate | None]  # given the loss
    copied: Any = None  # event; None on a CPU

    def complete(self, num_layers: int) -> dict[str, Any]:
        """Return the row with all values. Waits for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        scalars, sums = self.scalars.tolist(), self.sums.tolist()
        skipped = self.skipped(scalars[0])
        row = {**self.row, "skipped": "" if skipped is None else skipped.reason,
               **dict(zip(_SCALARS, scalars, strict=False))}
        if len(scalars) > len(_SCALARS):
            row["gradients"] = scalars[len(_SCALARS):]
        for key, names in self.names.items():
            count = num_layers if names is None else len(names)
            values, sums = sums[:count], sums[count:]
            row[key] = values if names is None else dict(zip(names, values, strict=True))
        if "reduced" in row:
            row["reduced"] = row["reduced"][""]
        return row


class FlightRecorder(Callback):
    """Records the steps of this rank.

    Args:
        steps: at least so many of the last steps are kept.
        interval: steps between two steps whose row has all keys; None: chosen from what they cost.
    """

    order = 60  # its measurements of a step begin after, and end before, what others with a lower order do

    def __init__(self, *, steps: int, interval: int | None) -> None:
        self._steps, self._interval = steps, interval
        self._cost = CostTimer()
        self._file: RecordFile | None = None
        self._unwritten: _Unwritten | None = None
        self._warned = False
        self._kept_spikes = 0

    def start(self, run: Run) -> None:
        """Begin the file of this start, after run.json has its record. Collective."""
        self._run, self._engine = run, run.engine
        self._layers = LayerDigests(run.engine, self._cost)
        self._reduced = attachments(run.engine).update.add(ReducedDigest(run.engine, self._cost))
        self.interval = FlightInterval(self._interval, run.engine.device)
        rank, number = run.world.rank, from_rank_0(partial(newest_start_number, run.folder.path))
        folder = start_folder(run.folder.path, number)
        header = Header(rank=rank, world_size=run.world.size, host=socket.gethostname(), pid=os.getpid(),
                        first_step=run.first_step, coordinates=rank_order(run.plan.layout).coordinates(rank),
                        layers=self._layers.names, interval=self._interval or 0, start=number)
        with self._warns():
            self._file = RecordFile(folder, header, steps=self._steps)
        run.watchdog.set_record(folder / f"rank_{rank}.jsonl", "flight")
        if rank == 0:
            prune_starts(run.folder.path, number)

    def before_step(self, run: Run, micro_batches: list[MicroBatch]) -> None:
        """Take the digests of everything that the step depends on."""
        began = time.perf_counter()
        self._is_full = self.interval.is_full(run.step)
        self._row: dict[str, Any] = {
            "step": run.step, "samples": [run.consumed_samples], "tokens": _crc(_tensors_of(micro_batches)),
            "lr": None, "loss_scale": loss_scale(self._engine), "random": _crc(random_states())}
        self._sums: dict[str, torch.Tensor] = {}
        self._names: dict[str, list[str] | None] = {}
        self._cost.take_ms()
        if self._is_full:
            self._add_held("")
            self._layers.begin()
            self._reduced.is_due = True
        self._began, self._own_ms = time.perf_counter(), (time.perf_counter() - began) * 1e3

    def after_step(self, run: Run, result: StepResult) -> None:
        """Take the digests of the results, and write the row of the step before."""
        began = time.perf_counter()
        norm = global_grad_norm(self._engine)
        self._row["samples"].append(run.consumed_samples)
        self._row |= {"lr": result.lr, "skipped": "", "time": time.time(),
                      "ms": round((began - self._began) * 1e3, 3)}
        scalars = [_scalar(value, self._engine.device)
                   for value in (result.loss, rank_loss(self._engine), 0.0 if norm is None else norm)]
        norms = self._add_layers() if self._is_full else []
        self._flush()
        self._unwritten = self._begin_copy(torch.cat([torch.stack(scalars), *norms]))
        if self._unwritten.copied is None:
            self._flush()
        self._choose_interval((time.perf_counter() - began) * 1e3 + self._own_ms)

    def _add_held(self, suffix: str) -> None:
        """Add the checksums of the parameters by layer, and of the states by name."""
        with self._cost.measured(), torch.no_grad():
            by_layer: dict[str, list[torch.Tensor]] = {name: [] for name in self._layers.names}
            for name, tensor in held_parameters(self._engine).items():
                by_layer[layer_of(name)].append(tensor)
            self._add(f"weights{suffix}", None, by_layer.values())
            states = held_states(self._engine)
            if states:
                self._add(f"states{suffix}", list(states), states.values())

    def _add(self, key: str, names: list[str] | None, tensors: Iterable[list[torch.Tensor]]) -> None:
        self._names[key] = names
        self._sums[key] = torch.stack([combined_checksum(each, self._engine.device) for each in tensors])

    def _add_layers(self) -> list[torch.Tensor]:
        """Add what the hooks have found, and the parameters after the update. Returns the norms of the gradients."""
        for key, sums in self._layers.operators().items():
            self._names[key], self._sums[key] = list(sums), torch.stack([*sums.values()])
        found = self._layers.end()
        norms = found.pop("gradients")
        self._sums |= found
        self._names |= dict.fromkeys(found)
        reduced = self._reduced.take()
        if reduced is not None:
            self._names["reduced"], self._sums["reduced"] = [""], reduced.reshape(1)
        self._add_held("_after")
        return [norms]

    def _begin_copy(self, scalars: torch.Tensor) -> _Unwritten:
        """Begin to copy the values of the newest step to the host."""
        sums = torch.cat([*self._sums.values()]) if self._sums else torch.empty(0, dtype=torch.int64)
        unwritten = _Unwritten(self._row, self._names, scalars, sums, begin_skipped_update(self._engine))
        if self._engine.device.type == "cpu":
            return unwritten
        unwritten.scalars, unwritten.sums = (
            torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            for values in (scalars, sums))
        unwritten.copied = get_accelerator().Event()
        unwritten.copied.record()
        return unwritten

    def _flush(self) -> None:
        """Write the row that is not written yet, if there is one."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None and self._file is not None:
            row = unwritten.complete(len(self._layers.names))
            with self._warns():
                self._file.append(row)

    def _choose_interval(self, own_ms: float) -> None:
        """Measure the step, if the interval is not chosen yet."""
        cost_ms = self._cost.take_ms() if self.interval.is_measured else own_ms
        if self.interval.observe(step_ms=self._row["ms"], cost_ms=cost_ms, is_full=self._is_full) \
                and self._file is not None:
            with self._warns():
                self._file.change_header(interval=self.interval.steps or 1, measured_ms=self.interval.measured_ms)

    @contextlib.contextmanager
    def _warns(self) -> Any:
        """Report the first error of the record's files; training continues."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                _warn(self._run, f"warning: {error.filename or 'the flight record'}: rows of the flight recorder are "
                                 f"lost ({error.strerror}); the run continues")
            self._warned = True

    def bad_step(self, run: Run, step: int) -> None:
        self._keep(step, SPIKE)

    def requested(self, run: Run, request: "Request") -> None:
        if RECORD_FILE in request.asked:
            self._keep(run.step, REQUEST)

    def _keep(self, step: int, reason: str) -> None:
        """Copy the record of this rank to RUN/flight/kept/step_S_REASON. Of spikes, only the first ones of a start."""
        self._flush()
        self._kept_spikes += reason == SPIKE
        if self._file is None or (reason == SPIKE and self._kept_spikes > _MOST_SPIKES):
            return
        with self._warns():
            self._file.copy_to(kept_folder(self._run.folder.path, step, reason))

    def close(self, run: Run) -> None:
        """Write the last row."""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _scalar(value: Any, device: torch.device) -> torch.Tensor:
    """Return a number or a tensor with one element as an fp64 scalar on the device. Does not wait for the device."""
    if torch.is_tensor(value):
        return value.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _tensors_of(micro_batches: list[MicroBatch]) -> Iterable[torch.Tensor]:
    """Yield the tensors that the host has. Weights that GPUs have normalized are on the device, and no step waits."""
    for inputs, targets in micro_batches:
        tensors = (*((inputs,) if torch.is_tensor(inputs) else inputs), *targets)
        yield from (tensor for tensor in tensors if tensor.device.type == "cpu")


def _crc(tensors: Iterable[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().numpy().data, value)
    return value


def _warn(run: Run, line: str) -> None:
    """Report a problem of the files: one line from each host, whose ranks share its disks."""
    if run.world.rank == 0:
        run.screen.line(line)
    elif run.world.local_rank == 0:
        print(f"{socket.gethostname()}: {line}", file=sys.stderr, flush=True)
