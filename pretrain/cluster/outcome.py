"""Progress of a run during one start, and how the start ended, from the run folder and the launcher's exit code.

A launcher hides the exit codes of the ranks. `deepspeed` exits with 247 if a rank was killed, with 1 if `deepspeed`
itself gets a signal, with the largest code of all hosts under pdsh, and with 0 if its child process was killed.
Therefore the files of the run (events.jsonl, checkpoints) take precedence over the launcher's exit code.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pretrain.checkpoint.format.run_checkpoints import newest_step
from pretrain.cli import say
from pretrain.errors import CRASHED, FINISHED, GUARD, HANG, REJECTED, STOPPED
from pretrain.monitor.read_run_folder import is_number, read_events, read_metrics

_FILES = ("events.jsonl", "metrics.jsonl")
_REASONS = {REJECTED: "rejected", STOPPED: "stopped", GUARD: "stopped by the bad-step guard", HANG: "hang"}
RETRY_S = 60.0  # time for which a read is tried again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class RunProgress:
    """Rows that one start has added to the run folder, and the step before and after the start."""

    events: list[dict[str, Any]]  # rows of events.jsonl
    steps: list[dict[str, Any]]  # training rows of metrics.jsonl
    first_step: int  # step from which this start resumed; its first training step is the next one
    kept_step: int  # step of the newest good checkpoint

    @property
    def last_step(self) -> int:
        """The last step that was logged or saved."""
        return max([self.first_step, self.kept_step, *(row["step"] for row in self.steps)])

    @property
    def began(self) -> bool:
        """True if this start has reached training: the event "start" is written when all ranks have connected."""
        return any(event["event"] == "start" for event in self.events)

    @property
    def hang(self) -> dict[str, Any] | None:
        """The event "hang", which the watchdog writes before it ends the ranks, or None."""
        return self._last("hang")

    @property
    def stop(self) -> dict[str, Any] | None:
        """The event "stop", which a run writes when it ends without an error, or None."""
        return self._last("stop")

    def _last(self, kind: str) -> dict[str, Any] | None:
        return next((event for event in reversed(self.events) if event["event"] == kind), None)


def file_sizes(run: Path) -> dict[str, int]:
    """Return file name -> size in bytes. A start appends its rows after these bytes."""
    return {name: (run / name).stat().st_size if (run / name).is_file() else 0 for name in _FILES}


def read_progress(run: Path, sizes_before: Mapping[str, int]) -> RunProgress:
    """Read the rows that a start has appended. `sizes_before`: result of `file_sizes` before the start."""
    events, metrics = read_events(run, sizes_before[_FILES[0]]), read_metrics(run, sizes_before[_FILES[1]])
    kept_step = newest_step(run / "checkpoints")
    first_step = next((event["step"] for event in events if event["event"] == "start"), kept_step)
    return RunProgress(events, [row for row in metrics if is_number(row.get("step_time_ms"))], first_step, kept_step)


def classify_exit(code: int, progress: RunProgress, *, last_step: int | None) -> tuple[int, str]:
    """Return (exit code, reason). The exit code is the one that train.py would have returned.

    Args:
        code: exit code of the launcher.
        progress: rows and checkpoints that this start has added to the run folder.
        last_step: step at which the run is complete; None: unknown.
    """
    complete = last_step is not None and progress.kept_step >= last_step
    stop = progress.stop
    ended = stop is not None and (stop.get("is_done") or stop["reason"] in ("finished", "early_stop", "--exit_step"))
    if ended or (stop is not None and complete):
        return FINISHED, "finished"
    if code == 0 and complete:
        return FINISHED, "finished"
    if stop is not None and stop.get("exit_code") == GUARD:
        return GUARD, _REASONS[GUARD]
    if code in (REJECTED, GUARD):
        return code, _REASONS[code]
    if progress.hang is not None and code not in (FINISHED, STOPPED):  # 247 and 137: the stopped rank was killed
        return HANG, f"hang: {progress.hang['reason']}"
    if code == HANG:
        return code, _REASONS[code]
    if stop is not None:
        return STOPPED, f"saved on {stop['reason']}"
    if code == STOPPED:
        return STOPPED, _REASONS[STOPPED]
    if code == 0:
        return CRASHED, "crash: the launcher exited with 0, but the run has not finished"
    return code, f"crash: {_describe_exit_code(code)}"


def _describe_exit_code(code: int) -> str:
    """Return the signal or the exit code as text."""
    if code == 255:
        return "exit code 255, which ssh uses for a lost connection"
    name = ending_signal(code)
    return f"{name} (exit code {code})" if name else f"exit code {code}"


def ending_signal(code: int) -> str:
    """Return the name of the signal that ended a process; "" if none did.

    -N (subprocess), 128 + N (shells and srun) and 256 - N (DeepSpeed's launcher, which calls exit(-N)) mean signal N.
    """
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 256 - code if code > 224 else 0
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return ""


def shell_exit_code(code: int | None) -> int:
    """Convert an exit code of subprocess to the shell's convention. None (not started) becomes 1."""
    return CRASHED if code is None else 128 - code if code < 0 else code


def read_patiently(run: Path, read: Callable[[], T], *, otherwise: U, exists: bool = False,
                   report: Callable[[str], None] = say) -> T | U:
    """Return `read()`, which may raise OSError: then it is tried again for a minute, reported, and is `otherwise`.

    `exists`: the run folder exists, so that an unmounted file system is an error, and not a folder without files.
    """
    end, pause_s = time.monotonic() + RETRY_S, _FIRST_PAUSE_S
    while True:
        try:
            if exists:
                os.stat(run)
            return read()
        except OSError as error:
            if time.monotonic() >= end:
                report(f"warning: {run} cannot be read: {error.strerror or error}")
                return otherwise
        time.sleep(min(pause_s, max(end - time.monotonic(), 0.0)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
