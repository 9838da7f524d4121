"""Requests to save, to stop, or for an extension: signals, files, the time limit, a dead launcher.

All ranks act after the same step.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain.distributed.host import state_and_start
from pretrain.errors import ConfigError
from pretrain.extension import RequestFile
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.paths import SAVE_FILE, STOP_FILE, status_of
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.signals import SignalListener
from pretrain.stored_json import read_text

_LOOKING_FRACTION = 0.01  # fraction of rank 0's time that looking for files may take, for example on NFS
_LONGEST_LOOK_S = 1.0  # longest time between two looks
# Reasons to stop, as numbers that the ranks exchange. Numbers below 100 are signals.
_LAUNCHER_DIED, _TIME_IS_OVER, _STOP_FILE = 100, 101, 102


@dataclass(frozen=True)
class Request:
    """Actions that the ranks have agreed on after a step."""

    stop: str = ""  # why the run saves and stops, such as "SIGTERM"; "": it continues
    save: bool = False  # save a checkpoint, and continue
    asked: Mapping[str, int] = field(default_factory=dict)  # file of an extension -> number: see RequestFile

    @property
    def needs_checkpoint(self) -> bool:
        """Return whether the ranks save after this step."""
        return self.save or self.stop != ""


class Requests:
    """Collects the requests of all ranks. `poll()` returns the same request on all ranks at the same step.

    The ranks exchange their requests after every step, in host memory with gloo: a request takes effect after the step
    in which it arrives, however long the steps are. An exchange only after some steps would have to predict the time of
    these steps. On GPUs the exchange does not wait for the device: a request takes effect after the step that the host
    prepares. This is at most one step after the one that the device computes, because `Guard.observe` waits for the
    step before.

    Args:
        device: device of the run; on GPUs the exchange gets a process group of its own.
        folder: run folder. Rank 0 looks there for the files STOP, SAVE and those of `asked`.
        launcher: notices that the launcher of this rank has died.
        exit_after_minutes: time limit since the start of rank 0's process; None: no limit.
        committed_step: returns the step of the newest checkpoint that this process has committed; called on rank 0.
        report: called with each line for the user.
        asked: files of extensions by name, the same on all ranks.
    """

    def __init__(self, device: torch.device, folder: RunFolder, launcher: LauncherWatch, *,
                 exit_after_minutes: float | None, committed_step: Callable[[], int],
                 report: Callable[[str], None], asked: Mapping[str, RequestFile]) -> None:
        self._folder, self._launcher, self._report, self._asked = folder, launcher, report, asked
        self._files = ControlFiles(folder.path, committed_step, asked) if dist.get_rank() == 0 else None
        self._look_at = 0.0  # time of the next look for files, by time.monotonic()
        self._time_limit = float("inf")  # rank 0's limit, by time.monotonic()
        if exit_after_minutes is not None and dist.get_rank() == 0:
            self._time_limit = time.monotonic() - process_age_s() + 60 * exit_after_minutes
        self._rejection = ""  # why this rank cannot continue
        self._group = None if device.type == "cpu" else dist.new_group(backend="gloo")
        self._signals = SignalListener(report)
        launcher.enable_save()

    def reject(self, line: str) -> None:
        """Make `poll` raise ConfigError on all ranks at the same step, without a save; may be called on any rank.

        The error of this rank has the text `line`.
        """
        self._rejection = self._rejection or line

    def poll(self, step: int) -> Request:
        """Return what the ranks have agreed to do after this step.

        All ranks must call this after each step (a collective), and all get the same result. Raises ConfigError on all
        ranks if some rank has called `reject`.
        """
        stop, save, rejected, *numbers = self._exchange()
        if rejected:
            raise ConfigError.from_line(self._rejection or "another rank has stopped the run: its output says why")
        if save and self._files is not None:
            self._files.save_begins(step)
            self._announce(step, str(self._files.save_path), "saving")
        asked = {name: number for name, number in zip(self._asked, numbers, strict=True) if number}
        for name in asked:
            if answer := self._asked[name].answer:
                self._announce(step, str(self._folder.path / name), answer)
        if stop:
            self._announce_stop(step, stop)
        return Request(self._reason(stop), save=bool(save), asked=asked)

    def _exchange(self) -> list[int]:
        """Return the maxima over all ranks: reason to stop, 1 to save, 1 if a rank rejects the run, and the numbers
        of the extensions' files.
        """
        stop, save, now = self._signals.first or (_LAUNCHER_DIED if self._launcher.lost else 0), False, time.monotonic()
        is_asked = self._signals.take_asked()
        asked = {name: file.number("") if is_asked and file.by_signal else 0 for name, file in self._asked.items()}
        stop = _TIME_IS_OVER if now >= self._time_limit else stop
        if self._files is not None and now >= self._look_at:
            stop = _STOP_FILE if self._files.stop_requested() else stop
            save = self._files.save_requested()
            asked |= self._files.take_asked()
            ended = time.monotonic()
            self._look_at = ended + min((ended - now) / _LOOKING_FRACTION, _LONGEST_LOOK_S)
        own = [stop, int(save), int(self._rejection != ""), *asked.values()]
        if dist.get_world_size(self._group) == 1:
            return own
        values = torch.tensor(own, dtype=torch.int32)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return list(values.tolist())

    def _reason(self, stop: int) -> str:
        """Return the text for a reason to stop, the same on all ranks."""
        if 0 < stop < _LAUNCHER_DIED:
            return signal.Signals(stop).name
        return {0: "", _LAUNCHER_DIED: "the end of the launcher", _TIME_IS_OVER: "--exit_after_minutes",
                _STOP_FILE: str(self._folder.path / STOP_FILE)}[stop]

    def _announce_stop(self, step: int, stop: int) -> None:
        if stop < _LAUNCHER_DIED:
            self._signals.report(stop)
            self._folder.event("signal", step=step, reason=self._reason(stop))
        else:
            self._announce(step, self._reason(stop), "saving, then stopping")

    def _announce(self, step: int, reason: str, action: str) -> None:
        self._report(f"{reason}: {action}")
        self._folder.event("signal", step=step, reason=reason)

    def close(self) -> None:
        """Ignore further signals, except Ctrl-C. The last step must have been saved."""
        self._signals.close()
        if self._files is not None:
            self._files.close()


def process_age_s() -> float:
    """Return the seconds since this process started. A change of the host's clock has no effect."""
    _, start_ticks = state_and_start(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


class ControlFiles:
    """Looks for the files STOP and SAVE, and those of extensions, in the run folder, on rank 0.

    A SAVE file is removed after the commit of its checkpoint.

    Args:
        run: run folder.
        committed_step: returns the step of the newest checkpoint that this process has committed.
        asked: files of extensions by name.
    """

    def __init__(self, run: Path, committed_step: Callable[[], int], asked: Mapping[str, RequestFile]) -> None:
        self.stop_path, self.save_path = run / STOP_FILE, run / SAVE_FILE
        self._committed_step = committed_step
        self._asked = {run / name: file for name, file in asked.items()}
        self._remaining: set[Path] = set()  # files that cannot be removed: each has acted once
        self._seen = 0  # modification time of the SAVE file that was requested last, in ns; 0: none yet
        self._saved_at: int | None = None  # step of the save for this file; None: there is no unfinished save

    def stop_requested(self) -> bool:
        return os.path.exists(self.stop_path)  # False after errors of a file server, which Path.exists raises

    def save_requested(self) -> bool:
        """Return whether there is a SAVE file that was not requested yet. If its save fails, `touch` requests another.
        """
        if self._saved_at is not None and self._committed_step() >= self._saved_at:
            self._saved_at = None
            if self._modified() == self._seen:
                self._remove()
        modified = self._modified()
        is_new = modified not in (0, self._seen)
        self._seen = modified or self._seen
        return is_new

    def save_begins(self, step: int) -> None:
        """Record that the requested checkpoint is saved after `step`."""
        self._saved_at = step

    def take_asked(self) -> dict[str, int]:
        """Remove the files of extensions that are there. Return their numbers by name."""
        return {path.name: self._take(path, file) for path, file in self._asked.items()
                if path not in self._remaining and os.path.exists(path)}

    def _take(self, path: Path, file: RequestFile) -> int:
        text = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = read_text(path)
        try:
            path.unlink()
        except OSError:
            self._remaining.add(path)
        return file.number(text)

    def close(self) -> None:
        """Remove SAVE: the last step of this process has been saved."""
        self._remove()

    def _modified(self) -> int:
        """Return the modification time of SAVE in ns; 0 if there is no such file."""
        status = status_of(self.save_path)
        return 0 if status is None else status.st_mtime_ns

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.save_path.unlink()
