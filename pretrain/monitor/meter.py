"""Meter: writes rows of metrics.jsonl and lines on the screen. Only logged steps read values from the device.

Sinks: DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet) and Trackio get the values of the rows.
"""

import contextlib
import io
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from pretrain.callback import Callbacks, Run, StepResult
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.engine.patches.monitors import SurvivingMonitor, take_monitors, write_note
from pretrain.engine.phases import PhaseTimers
from pretrain.engine.update_statistics import GradientStats, UpdateSize
from pretrain.errors import ConfigError, escape_controls
from pretrain.monitor.read_run_folder import Goodput
from pretrain.monitor.training_row import (
    HighestLoss,
    Interval,
    combine_ranks,
    eta_seconds,
    evaluation_line,
    format_duration,
    gather_ranks,
    perplexity,
    power_watts,
    row_line,
    tokens_per_second,
    training_row,
)
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal import Screen

_NAMES = {"loss": "train_loss"}  # DeepSpeed's name
_NOT_SENT = ("consumed_samples", "time")  # the x-axis; the monitors record the time themselves
Event = tuple[str, float, int]
"""(name, value, consumed samples), as DeepSpeed's monitors take it"""


class Timer(Protocol):
    """Measures something of the training steps since the last row."""

    def paused(self) -> AbstractContextManager[None]:
        """Measure nothing inside of this context, which is outside of the steps: a save, an evaluation."""

    def restart(self) -> None:
        """Forget what was measured since the last row: not all of it was steps, or they are undone."""


@dataclass
class _SinceRow:
    """Steps, samples and times since the last row."""

    step: int  # step of the last row
    consumed_samples: int  # at the last row
    start: float = field(default_factory=time.perf_counter)
    data_seconds: float = 0.0
    excluded_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Meter:
    """Measures the steps between logged ones. Rank 0 reports a line for each logged step and each evaluation.

    On a terminal the status line also shows the current step, the speed and the remaining time.
    """

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, folder: RunFolder, screen: Screen, *, rank: int,
                 first_step: int, phases: PhaseTimers, update_size: UpdateSize, callbacks: Callbacks) -> None:
        self.plan, self.engine, self.folder, self.screen = plan, engine, folder, screen
        self.losses: dict[str, float] = {}  # last value of "loss", "valid loss", "test loss"
        self.interval: Interval | None = None  # the steps of the newest row, or of the row that is being made
        self._step = first_step  # the last step that was trained
        self._consumed_samples = self._batch_size = 0
        self._since = _SinceRow(first_step, 0)
        self._goodput = Goodput.read(folder.path, first_step) if rank == 0 else None
        self._sinks = Sinks(engine, rank=rank, run=folder.path, trackio=plan.args.trackio,
                            note=plan.args.note or "", first_step=first_step)
        self._callbacks = callbacks
        self._phases, self._update_size = phases, update_size
        self.timers: list[Timer] = [phases]  # callbacks may add theirs
        self._highest_loss = HighestLoss(engine)
        self._gradients = GradientStats(engine)

    def timed_data(self, load: Callable[[int], list[MicroBatch]], consumed_samples: int) -> list[MicroBatch]:
        """Call `load(consumed_samples)`, and add its time to the waiting time for data."""
        start = time.perf_counter()
        micro_batches = load(consumed_samples)
        self._since.data_seconds += time.perf_counter() - start
        return micro_batches

    @contextlib.contextmanager
    def outside_steps(self, kind: str) -> Iterator[None]:
        """Exclude the time of a "save", an "eval" or something else from the step time of the next row."""
        get_accelerator().synchronize()  # the steps until now count as steps
        start = time.perf_counter()
        try:
            with ExitStack() as stack:
                for timer in self.timers:
                    stack.enter_context(timer.paused())
                yield
        finally:
            self._since.excluded_seconds[kind] += time.perf_counter() - start

    def restart(self, step: int, consumed_samples: int) -> None:
        """Begin to measure after `step`, at the start or after a rollback. Everything since the last row is dropped."""
        if self._goodput is not None:
            self._goodput.return_to(step)
        self._restart_times()
        self._highest_loss.take()
        self._gradients.take()
        self._step, self._consumed_samples, self._since = step, consumed_samples, _SinceRow(step, consumed_samples)
        self._update_size.is_due = self.due(step + 1)

    def restart_timing(self, step: int) -> None:
        """Exclude the time until now from the next row, for example the time of a profile: `step` is the last one."""
        self._restart_times()
        self._since = _SinceRow(step, self._consumed_samples)

    def _restart_times(self) -> None:
        for timer in self.timers:
            timer.restart()

    def due(self, step: int) -> bool:
        return step % self.plan.args.log_interval == 0 or step in (1, self.plan.train_steps)

    def log(self, run: Run, result: StepResult) -> None:
        """Report the step `run.step` if it is a logged step."""
        self._highest_loss.observe()
        self._gradients.observe()
        self._batch_size = run.consumed_samples - self._consumed_samples
        self._step, self._consumed_samples = run.step, run.consumed_samples
        if self.due(run.step):
            self._log_row(run, result)
        self._update_size.is_due = self.due(run.step + 1)
        self._show_progress(run.step)

    def _log_row(self, run: Run, result: StepResult) -> None:
        loss_now = float(result.loss)  # waits for the device: the time until now consists of complete steps
        self.interval = interval = self._interval()
        total_ms = self._phases.take_ms()
        given = self._callbacks.rank_values(run)
        logged = run.take_logged()
        ranks, others = gather_ranks(
            self._highest_loss.take(), data_seconds=interval.data_seconds / interval.steps,
            phase_ms={phase: total / interval.steps for phase, total in total_ms.items()}, power_watts=power_watts(),
            squares=self._update_size.take_squares(), others=[
                *(value for values in given.values() for value in values),
                *(each.of_rank() for each in logged.values())])
        row = training_row(self.plan, self.engine, interval, combine_ranks(ranks), loss=loss_now, lr=result.lr,
                           gradients=self._gradients.take())
        row["goodput"] = self._add_goodput(interval)
        added = self._callbacks.row_values(run, given, others)
        if taken := sorted(row.keys() & added.keys()):
            raise ConfigError(f"row_values of a callback: {taken[0]}",
                              problem="the rows of steps have this key already", remedy="choose another name")
        row |= added
        for (name, value), column in zip(logged.items(), others.T[others.shape[1] - len(logged):], strict=True):
            if name in row:
                raise ConfigError(f"run.log({name!r})", problem="the rows of steps have this key already",
                                  remedy="choose another name")
            row[name] = value.of_all(column)
        self._since = _SinceRow(self._step, self._consumed_samples)
        self.write(row)
        self.losses["loss"] = row["loss"]
        self.screen.line(row_line(row, train_steps=self.plan.train_steps, fp16=self.plan.layout.precision == "fp16",
                                  columns=self.screen.columns))
        self._callbacks("after_row", run, row)

    def _interval(self) -> Interval:
        """Return the steps since the last row."""
        since, steps = self._since, max(self._step - self._since.step, 1)
        seconds = time.perf_counter() - since.start - sum(since.excluded_seconds.values())
        return Interval(step=self._step, steps=steps, step_seconds=seconds / steps,
                        samples=self._consumed_samples - since.consumed_samples,
                        consumed_samples=self._consumed_samples,
                        batch_size=self._batch_size, data_seconds=since.data_seconds,
                        save_seconds=since.excluded_seconds["save"], eval_seconds=since.excluded_seconds["eval"])

    def _add_goodput(self, interval: Interval) -> float | None:
        if self._goodput is None:
            return None
        self._goodput.add(interval.step, interval.step_seconds)
        return self._goodput.fraction(time.time())

    def log_eval(self, run: Run, name: str, loss: float, *, num_sets: int = 0) -> float:
        """Report an evaluation on the dataset `name` ("valid", "valid/NAME", "test"). Return the loss.

        With `num_sets`, it is the mean of the losses of this number of named sets.
        """
        row: dict[str, Any] = {"step": run.step, "time": time.time(), "consumed_samples": run.consumed_samples,
                               "split": name, "eval_loss": loss, "eval_ppl": perplexity(loss)}
        if num_sets:
            row["mean_of_sets"] = num_sets
        self.write(row)
        self.losses[f"{name} loss"] = loss
        self.screen.line(evaluation_line(row))
        self._callbacks("after_row", run, row)
        return loss

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl, and pass it to the monitors."""
        self.folder.metrics(row)
        self._sinks.write(row)

    def close(self) -> None:
        """Let the monitors write their last values."""
        self._sinks.close()

    def _show_progress(self, step: int) -> None:
        """Show the status line: the speed of the steps since the last row, or at a row, of the steps before it."""
        if not self.screen.wants_status():
            return
        interval = self.interval if step == self._since.step and self.interval else self._interval()
        speed, remaining = tokens_per_second(self.plan, interval), format_duration(eta_seconds(self.plan, interval))
        self.screen.status(f"step {step}/{self.plan.train_steps}  {speed:,.0f} tokens/s  ETA {remaining}")


class Sinks:
    """Writes each row of metrics.jsonl to the monitors that the DeepSpeed JSON and --trackio select, on rank 0.

    The monitors that have a place for text also get --note, at the start.
    """

    def __init__(self, engine: DeepSpeedEngine, *, rank: int, run: Path, trackio: str | None, note: str,
                 first_step: int) -> None:
        monitors, note = take_monitors(engine), escape_controls(note)
        self._monitors: list[Any] = [monitors] if monitors.enabled and rank == 0 else []
        self._trackio = SurvivingMonitor(lambda: TrackioMonitor(trackio, run, note), "trackio") \
            if trackio is not None and rank == 0 else None
        if self._trackio is not None:
            self._monitors.append(self._trackio)
        if note and rank == 0:
            write_note(monitors, note, first_step)

    def write(self, row: dict[str, Any]) -> None:
        for monitor in self._monitors:
            monitor.write_events(events_of(row))

    def close(self) -> None:
        if self._trackio is not None:
            self._trackio.finish()


def events_of(row: dict[str, Any]) -> list[Event]:
    """Return an event for each number of a row. Its x is the number of consumed samples.

    Like metrics.jsonl, which has null for them, the monitors get no NaN and no infinity.
    """
    samples = row["consumed_samples"]
    if "eval_loss" in row:
        names = {"eval_loss": f"Evaluation/{row['split']}_loss", "eval_ppl": f"Evaluation/{row['split']}_ppl"}
    elif "split" in row:  # an extension's row
        names = {key: f"Evaluation/{row['split']}_{key}" for key in row if key not in (*_NOT_SENT, "step", "split")}
    else:
        names = {key: f"Train/Samples/{_NAMES.get(key, key)}" for key in row if key not in _NOT_SENT}
    return [(name, row[key], samples) for key, name in names.items()
            if isinstance(row[key], (int, float)) and math.isfinite(row[key])]


class TrackioMonitor:
    """Writes events to a project of Trackio, which is no monitor of DeepSpeed. A run that resumes continues its curves.

    Args:
        project: name of the project.
        run: run folder; the name of its last part is the run's.
        note: a text for the run's configuration, or "".
    """

    def __init__(self, project: str, run: Path, note: str) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open its dashboard
            self._run: Any = trackio.init(project=project, name=run.absolute().name, resume="allow", embed=False,
                                          auto_log_gpu=False, auto_log_cpu=False,
                                          config={"note": note} if note else None)

    def write_events(self, events: list[Event]) -> None:
        values: dict[int, dict[str, float]] = defaultdict(dict)
        for name, value, samples in events:
            values[samples][name] = value
        for samples, row in values.items():
            self._run.log(row, step=samples)

    def finish(self) -> None:
        """Wait until everything is written."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self._run.finish()
