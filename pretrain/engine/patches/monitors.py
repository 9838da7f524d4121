"""Defects of DeepSpeed's monitors and of its flops profiler.

If one fails, it ends the run: DeepSpeed does not catch their exceptions, which occur on rank 0 alone. The values that
reach the monitors depend on the engine.

Guarded by tests/engine/test_monitors.py and tests/distributed/test_metrics.py.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.monitor import monitor as monitors
from deepspeed.runtime.pipe.engine import PipelineEngine

_CLASSES = {"TensorBoardMonitor": "tensorboard", "WandbMonitor": "wandb", "csvMonitor": "csv_monitor",
            "CometMonitor": "comet"}


def survive_failing_monitors() -> None:
    """Make each monitor's failure one warning, at its construction or later. The run continues without this monitor.

    DeepSpeed 0.19.8 (monitor/monitor.py, MonitorMaster) constructs and calls the monitors on rank 0: without a login to
    W&B, on a full disk or after a lost connection, rank 0 raises, and the other ranks wait in a collective.
    """
    for name, block in _CLASSES.items():
        constructor = getattr(monitors, name)
        if not isinstance(constructor, _Constructor):
            setattr(monitors, name, _Constructor(constructor, block))


def take_monitors(engine: DeepSpeedEngine) -> monitors.MonitorMaster:
    """Return the engine's monitors, and keep the engine from writing to them: the caller writes all values.

    DeepSpeed 0.19.8: both engines write learning rate and loss scale (runtime/engine.py, step; runtime/pipe/engine.py,
    _exec_optimizer_step). Only PipelineEngine writes losses: train_batch waits for the device in every step, and
    eval_batch writes one point for each batch of an evaluation, all at the same x. The times that the engine writes
    with wall_clock_breakdown or the flops profiler still reach the monitors (runtime/engine.py, _write_monitor).
    """
    taken: monitors.MonitorMaster = engine.monitor
    engine.monitor = _ElapsedTimesOnly(taken, enabled=taken.enabled and bool(
        engine.wall_clock_breakdown() or engine.flops_profiler_enabled()) and not isinstance(engine, PipelineEngine))
    return taken


def write_note(taken: monitors.MonitorMaster, text: str, step: int) -> None:
    """Write a text to the monitors of `take_monitors` that have a place for it."""
    for monitor in (taken.tb_monitor, taken.wandb_monitor, taken.comet_monitor):
        if monitor is not None:
            monitor.write_note(text, step)


class _ElapsedTimesOnly:
    """Stands in for the monitors of an engine. It passes on only the times of the phases that DeepSpeed measures."""

    def __init__(self, monitors_taken: monitors.MonitorMaster, *, enabled: bool) -> None:
        self._monitors, self.enabled = monitors_taken, enabled

    def write_events(self, events: list[tuple[str, Any, int]]) -> None:
        self._monitors.write_events([event for event in events if "/elapsed_time_" in event[0]])


class _Constructor:
    """Stands in for the class of a monitor."""

    def __init__(self, constructor: Callable[[Any], Any], block: str) -> None:
        self._constructor, self._block = constructor, block

    def __call__(self, config: Any) -> "SurvivingMonitor":
        return SurvivingMonitor(lambda: self._constructor(config), self._block)


class SurvivingMonitor:
    """A monitor that is dropped at its first exception."""

    def __init__(self, construct: Callable[[], Any], block: str) -> None:
        self._block, self._monitor = block, None
        if block == "tensorboard":
            _silence_tensorboard_thread()
        try:
            self._monitor = construct()
            if block == "csv_monitor":
                _write_headers_once(self._monitor)
        except Exception as error:  # each service has its own exceptions
            self._drop(error)

    def write_events(self, events: Any) -> None:
        if self._monitor is None:
            return
        try:
            self._monitor.write_events(events)
        except Exception as error:
            self._drop(error)

    def write_note(self, text: str, step: int) -> None:
        """Write a text to a monitor that has a place for it, which the CSV files have not."""
        if self._monitor is None:
            return
        try:
            if self._block == "tensorboard":
                self._monitor.summary_writer.add_text("note", text, step)
            elif self._block == "wandb":
                import wandb

                wandb.run.notes = text
            elif self._block == "comet":
                self._monitor.experiment.log_other("note", text)
        except Exception as error:
            self._drop(error)

    def finish(self) -> None:
        """Let a monitor that has such a method write its last values."""
        try:
            getattr(self._monitor, "finish", lambda: None)()
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        self._monitor = None
        _warn(f"{self._block}: the monitor failed", error)


def _write_headers_once(monitor: Any) -> None:
    """Let a resumed run append to its CSV files without a second header.

    DeepSpeed 0.19.8 (monitor/csv_monitor.py, write_events) writes the header whenever this process has not yet written
    to a file.
    """
    monitor.filenames += [path.stem for path in Path(monitor.log_dir).glob("*.csv")]


def _silence_tensorboard_thread() -> None:
    """Let the thread that writes TensorBoard's files end without a traceback. `write_events` raises its error again."""
    report = threading.excepthook

    def hook(args: Any) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            report(args)

    threading.excepthook = hook


def _warn(what: str, error: Exception) -> None:
    first_line = next(iter(str(error).strip().splitlines()), "")
    with contextlib.suppress(OSError):
        print(f"warning: {what} ({type(error).__name__}: {first_line:.300}); the run continues without it",
              file=sys.stderr, flush=True)


def patch_flops_profiler(engine: DeepSpeedEngine) -> None:
    """Patch the engine's flops profiler, if it has one."""
    profiler = getattr(engine, "flops_profiler", None)
    if profiler is not None:
        survive_failing_profile(profiler)


def survive_failing_profile(profiler: Any) -> None:
    """Make it one warning if the flops profiler cannot write its output file.

    DeepSpeed 0.19.8 (runtime/engine.py, step) writes it on rank 0, and the profiler then leaves stdout redirected.
    """
    print_model_profile = profiler.print_model_profile

    def print_or_warn(**arguments: Any) -> None:
        stdout = sys.stdout
        try:
            print_model_profile(**arguments)
        except Exception as error:
            _warn("flops_profiler: the profile is not written", error)
        finally:
            sys.stdout = stdout

    profiler.print_model_profile = print_or_warn
