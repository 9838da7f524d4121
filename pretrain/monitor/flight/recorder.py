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
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import from_rank_0
from pretrain.distributed.world import World
from pretrain.engine.attachments import attachments
from pretrain.engine.checksums import combined_checksum, held_parameters
from pretrain.engine.first_micro_batch import random_states
from pretrain.engine.layer_digests import CostTimer, LayerDigests, ReducedDigest
from pretrain.engine.layer_hooks import layer_of
from pretrain.engine.parallelism import rank_order
from pretrain.engine.steps import global_grad_norm, learning_rate_of_update, loss_scale, rank_loss
from pretrain.engine.update_guard import SkippedUpdate, begin_skipped_update
from pretrain.monitor.flight.interval import FlightInterval
from pretrain.monitor.flight.record_files import Header, RecordFile, kept_folder, prune_starts, start_folder
from pretrain.monitor.read_run_folder import newest_start_number
from pretrain.terminal import Screen

HeldStates = Callable[[], dict[str, list[torch.Tensor]] | None]
"""Return this rank's master weights and optimizer states by name; None while they are on NVMe."""

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


class FlightRecorder:
    """Records the steps of this rank.

    Args:
        states: see HeldStates.
        interval: --flight_interval; None: auto.
        is_on: False: all methods do nothing.
        warn: prints a line, once, if the record cannot be written.
    """

    def __init__(self, engine: DeepSpeedEngine, states: HeldStates, run: Path, *, interval: int | None, is_on: bool,
                 warn: Callable[[str], None]) -> None:
        self._engine, self._states, self._run = engine, states, run
        self._warn, self._is_on = warn, is_on
        self._cost = CostTimer()
        self._layers = LayerDigests(engine, self._cost)
        self._reduced = attachments(engine).update.reduced = ReducedDigest(engine, self._cost)
        self.interval = FlightInterval(interval, engine.device)
        self._file: RecordFile | None = None
        self._unwritten: _Unwritten | None = None
        self._warned = False
        self._kept_spikes = 0

    @property
    def layers(self) -> list[str]:
        """Names of this rank's layers, for the header."""
        return self._layers.names

    def open(self, make_file: Callable[[], RecordFile]) -> None:
        """Begin to write. Without this call the steps are recorded, but not written."""
        with self._warns():
            self._file = make_file()

    def before_step(self, step: int, micro_batches: list[MicroBatch], consumed_samples: int) -> None:
        """Take the digests of everything that the step depends on. `consumed_samples`: before the step."""
        if not self._is_on:
            return
        began = time.perf_counter()
        self._is_full = self.interval.is_full(step)
        self._row: dict[str, Any] = {
            "step": step, "samples": [consumed_samples], "tokens": _crc(_tensors_of(micro_batches)),
            "lr": None, "loss_scale": loss_scale(self._engine), "random": _crc(random_states())}
        self._sums: dict[str, torch.Tensor] = {}
        self._names: dict[str, list[str] | None] = {}
        self._cost.take_ms()
        if self._is_full:
            self._add_held("")
            self._layers.begin()
            self._reduced.is_due = True
        self._began, self._own_ms = time.perf_counter(), (time.perf_counter() - began) * 1e3

    def after_step(self, loss: torch.Tensor, consumed_samples: int) -> None:
        """Take the digests of the results, and write the row of the step before. `consumed_samples`: after the step."""
        if not self._is_on:
            return
        began = time.perf_counter()
        norm = global_grad_norm(self._engine)
        self._row["samples"].append(consumed_samples)
        self._row |= {"lr": learning_rate_of_update(self._engine), "skipped": "", "time": time.time(),
                      "ms": round((began - self._began) * 1e3, 3)}
        scalars = [_scalar(value, self._engine.device)
                   for value in (loss, rank_loss(self._engine), 0.0 if norm is None else norm)]
        norms = self._add_layers() if self._is_full else []
        self._flush()
        self._unwritten = self._begin_copy(torch.cat([torch.stack(scalars), *norms]))
        if self._unwritten.copied is None:
            self._flush()
        self._choose_interval((time.perf_counter() - began) * 1e3 + self._own_ms)

    def _add_held(self, suffix: str) -> None:
        """Add the checksums of the parameters by layer, and of the states by name."""
        with self._cost.measured(), torch.no_grad():
            by_layer: dict[str, list[torch.Tensor]] = {name: [] for name in self.layers}
            for name, tensor in held_parameters(self._engine).items():
                by_layer[layer_of(name)].append(tensor)
            self._add(f"weights{suffix}", None, by_layer.values())
            states = self._states()
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
            row = unwritten.complete(len(self.layers))
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
                self._warn(f"warning: {error.filename or 'the flight record'}: rows of the flight recorder are lost "
                           f"({error.strerror}); the run continues")
            self._warned = True

    def keep(self, step: int, reason: str) -> None:
        """Copy the record of this rank to RUN/flight/kept/step_S_REASON. Of spikes, only the first ones of a start."""
        self._flush()
        self._kept_spikes += reason == SPIKE
        if self._file is None or (reason == SPIKE and self._kept_spikes > _MOST_SPIKES):
            return
        with self._warns():
            self._file.copy_to(kept_folder(self._run, step, reason))

    def close(self) -> None:
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
    for inputs, targets in micro_batches:
        yield from (inputs,) if torch.is_tensor(inputs) else inputs
        yield from targets


def _crc(tensors: Iterable[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().numpy().data, value)
    return value


def begin_record(plan: Plan, world: World, engine: DeepSpeedEngine, screen: Screen, states: HeldStates, *,
                 first_step: int, set_path: Callable[[Path], None]) -> FlightRecorder:
    """Return the recorder of this rank, after run.json has the record of this start. Collective.

    Args:
        set_path: gives the path of the record to the watcher of this rank.
    """
    args, run = plan.args, Path(plan.args.save)
    recorder = FlightRecorder(engine, states, run, interval=args.flight_interval, is_on=args.flight_steps > 0,
                              warn=partial(_warn, screen, world))
    if not args.flight_steps:
        return recorder
    start = from_rank_0(partial(newest_start_number, run))
    header = Header(rank=world.rank, world_size=world.size, host=socket.gethostname(), pid=os.getpid(),
                    first_step=first_step, coordinates=rank_order(plan.layout).coordinates(world.rank),
                    layers=recorder.layers, interval=args.flight_interval or 0, start=start)
    recorder.open(lambda: RecordFile(start_folder(run, start), header, steps=args.flight_steps))
    set_path(start_folder(run, start) / f"rank_{world.rank}.jsonl")
    if world.rank == 0:
        prune_starts(run, start)
    return recorder


def _warn(screen: Screen, world: World, line: str) -> None:
    """Report a problem of the files: one line from each host, whose ranks share its disks."""
    if world.rank == 0:
        screen.line(line)
    elif world.local_rank == 0:
        print(f"{socket.gethostname()}: {line}", file=sys.stderr, flush=True)
