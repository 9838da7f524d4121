"""A launcher that runs as a child process: signals to its parent, its ranks, and orphans. Without torch."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any

import psutil

from pretrain.active_extensions import BUILT_IN_EXTENSIONS
from pretrain.checkpoint.save.background import WRITER_MODULE
from pretrain.cli import say
from pretrain.cluster.hosts.probe import can_save, command_line
from pretrain.resilience.signals import LAST_SIGNAL, SIGNALS, SignalCount, describe

_PR_SET_CHILD_SUBREAPER = 36  # option of prctl(2)
_POLL_S = 0.5


class SignalRecorder:
    """Records the signals to this process, instead of their default action, while the context is open.

    Signals that are already ignored (SIGHUP under nohup) stay ignored. A handler must not print, because it may
    interrupt a print: `take` and `must_end` are called outside it.
    """

    def __init__(self) -> None:
        self.ended_by = 0  # number of the signal that demands an end without a save; 0: none
        self._count, self._new = SignalCount(), list[tuple[int, int]]()

    @property
    def name(self) -> str:
        """Name of the first signal; "": no signal yet."""
        return signal.Signals(self._count.first).name if self._count.first else ""

    def __enter__(self) -> "SignalRecorder":
        used = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._record) for number in used}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        ordinal = self._count.add(number)
        if ordinal:
            self._new.append((number, ordinal))
        if ordinal >= LAST_SIGNAL:
            self.ended_by = self.ended_by or number

    def take(self) -> list[tuple[int, int]]:
        """Return the signals that count since the last call: (number, ordinal of `SignalCount.add`)."""
        taken, self._new = self._new, []
        return taken

    def must_end(self, ask_ranks: Callable[[int], object]) -> bool:
        """Handle the new signals. Return whether all ranks must end now, without a save.

        `ask_ranks` passes the first signal on to the ranks. Its result is false if no rank can save, because training
        has not begun.
        """
        for number, ordinal in self.take():
            if ordinal > 1:  # the ranks report the first signal
                say(describe(number, ordinal))
            elif not ask_ranks(number):
                say(f"{signal.Signals(number).name}: stopped before training began")
                self.ended_by = number
        return self.ended_by != 0


def wait_for_launcher(launcher: "subprocess.Popen[Any]", interrupted: Callable[[], object], *,
                      grace_s: float = float("inf")) -> int | None:
    """Wait until the launcher has ended. Returns its exit code, or None as soon as `interrupted()` is true.

    If a signal has killed the launcher, its ranks save: wait until they have ended, too, at most `grace_s`.
    """
    deadline = float("inf")
    while not interrupted():
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = launcher.wait(_POLL_S)
            deadline = min(deadline, time.monotonic() + grace_s)
            if code >= 0 or time.monotonic() > deadline or not any(can_save(rank.pid) for rank in descendants()):
                return code
            time.sleep(_POLL_S)
        reap_orphans(launcher.pid)
    return None


def become_subreaper() -> None:
    """Become a subreaper: if a launcher is killed, its ranks become children of this process, not of init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(launcher: int) -> None:
    """Collect orphans that this subreaper has adopted and that have ended; `launcher` is the child that it waits for.

    Otherwise they remain as zombies. After a crash, DeepSpeed's launcher waits 30 s for a zombie among the descendants
    of its ranks (launcher/launch.py, terminate_process_tree, 0.19.8).
    """
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != launcher and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def descendants() -> list[psutil.Process]:
    """Return all descendants of this process except those that end by themselves: checkpoint writers after their save,
    and processes that built-in extensions have started.
    """
    return [process for process in psutil.Process().children(recursive=True) if not _ends_by_itself(process)]


def _ends_by_itself(process: psutil.Process) -> bool:
    words = command_line(process)
    modules = [module for program, module in pairwise(words) if program.endswith("child.py")]
    return WRITER_MODULE in words or any(module.startswith(f"{BUILT_IN_EXTENSIONS}.") for module in modules)
