"""Failing monitors and profilers end a run: DeepSpeed does not catch their exceptions, which occur on rank 0 alone.

Guarded by tests/engine/test_monitors.py.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.monitor import monitor as monitors

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


class _Constructor:
    """Stands in for the class of a monitor."""

    def __init__(self, constructor: Callable[[Any], Any], block: str) -> None:
        self._constructor, self._block = constructor, block

    def __call__(self, config: Any) -> "_SurvivingMonitor":
        return _SurvivingMonitor(lambda: self._constructor(config), self._block)


class _SurvivingMonitor:
    """A monitor that is dropped at its first exception."""

    def __init__(self, construct: Callable[[], Any], block: str) -> None:
        self._block, self._monitor = block, None
        if block == "tensorboard":
            _silence_tensorboard_thread()
        try:
            self._monitor = construct()
        except Exception as error:  # each service has its own exceptions
            self._drop(error)

    def write_events(self, events: Any) -> None:
        if self._monitor is None:
            return
        try:
            self._monitor.write_events(events)
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        self._monitor = None
        _warn(f"{self._block}: the monitor failed", error)


def _silence_tensorboard_thread() -> None:
    """Let the thread that writes TensorBoard's files end without a traceback. `write_events` raises its error again."""
    report = threading.excepthook

    def hook(args: Any) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            report(args)

    threading.excepthook = hook


def survive_failing_profile(engine: DeepSpeedEngine) -> None:
    """Make it one warning if the flops profiler cannot write its output file.

    DeepSpeed 0.19.8 (runtime/engine.py, step) writes it on rank 0, and the profiler then leaves stdout redirected.
    """
    profiler = getattr(engine, "flops_profiler", None)
    if profiler is None:
        return
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


def _warn(what: str, error: Exception) -> None:
    first_line = next(iter(str(error).strip().splitlines()), "")
    with contextlib.suppress(OSError):
        print(f"warning: {what} ({type(error).__name__}: {first_line:.300}); the run continues without it",
              file=sys.stderr, flush=True)
