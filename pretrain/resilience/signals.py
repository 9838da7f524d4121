"""Signals to a rank or a launcher. The first one asks for a save, the second changes nothing, the third ends at once.

Without torch, because the launchers also use this rule.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import psutil

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASKING_SIGNAL = signal.SIGUSR2  # asks what a file of an extension asks: RequestFile.by_signal
LAST_SIGNAL = 3  # number of signals that end a process at once
_COPY_S = 5.0  # a launcher passes a signal on to its ranks within this time


class SignalCount:
    """Counts the requests that signals make. Ctrl-C (SIGINT) always counts.

    Programs send the other signals, and a rank may get a signal twice, because launchers pass on copies. After a
    Ctrl-C, DeepSpeed's launcher sends SIGTERM to the ranks, which have also got SIGINT from the terminal
    (launcher/launch.py, sigkill_handler, 0.19.8). Therefore a signal other than SIGINT counts only if `_COPY_S` seconds
    have passed since the previous one.
    """

    def __init__(self) -> None:
        self.first = 0  # number of the first signal; 0: none yet
        self._count, self._counted_at = 0, 0.0

    def add(self, number: int) -> int:
        """Record a signal. Returns 1 for the first signal, 2 for the second ..., and 0 if it does not count."""
        now = time.monotonic()
        if self._count and number != signal.SIGINT and now - self._counted_at < _COPY_S:
            return 0
        self.first = self.first or number
        self._count, self._counted_at = self._count + 1, now
        return self._count


def describe(number: int, ordinal: int) -> str:
    """Return a line for the user: the effect of a signal, and of the next one. `ordinal`: result of `add`."""
    name = signal.Signals(number).name
    if ordinal == 1:
        return f"{name}: all ranks save after the current step, then stop (a second signal changes nothing, a third " \
               "one ends the run without this save)"
    if ordinal == 2:
        return f"{name}: the run is about to save and stop; the next signal ends it at once, without this save"
    return f"{name}: ended at once, without waiting for the save; complete checkpoints remain"


class SignalListener:
    """Receives the signals of a rank in a thread, from the time when it can save until the process ends.

    Python runs handlers only in the main thread, between two bytecodes, but the main thread may be blocked in a
    collective or a save. The handlers do nothing; a thread gets the numbers through Python's wakeup file descriptor.

    Args:
        report: called with one line after each signal that counts.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.reported = False
        self._is_asked = False
        self._count, self._report, self._closed = SignalCount(), report, False
        self._ranks, self._launcher = _ranks_of_launcher()
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=[reader], name="signals", daemon=True).start()
        for number in (*SIGNALS, ASKING_SIGNAL):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by nohup: the end of the terminal must not end the run
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)  # system calls of libraries are restarted, not interrupted

    @property
    def first(self) -> int:
        """Number of the first signal that this rank got; 0: none yet."""
        return self._count.first

    def report(self, number: int) -> None:
        """Report the first signal, which may have gone to another rank, unless this rank has reported one."""
        if not self.reported:
            self.reported = True
            self._report(describe(number, 1))

    def take_asked(self) -> bool:
        """Return whether ASKING_SIGNAL has come since the last call."""
        taken, self._is_asked = self._is_asked, False
        return taken

    def close(self) -> None:
        """Count only Ctrl-C from now on: after one rank has ended, DeepSpeed's launcher sends SIGTERM to the others."""
        self._closed = True

    def _listen(self, reader: socket.socket) -> None:
        while numbers := reader.recv(1):
            if numbers[0] == ASKING_SIGNAL:
                self._is_asked = True
            if numbers[0] in SIGNALS and not (self._closed and numbers[0] != signal.SIGINT):
                self._receive(numbers[0])

    def _receive(self, number: int) -> None:
        if number == signal.SIGTERM and self._another_rank_has_ended():
            os._exit(128 + number)
        ordinal = self._count.add(number)
        if ordinal == 1:
            self.report(number)
        elif ordinal:
            self._report(describe(number, ordinal))
        if ordinal >= LAST_SIGNAL:
            os._exit(128 + number)

    def _another_rank_has_ended(self) -> bool:
        """Return whether another rank of this launcher has crashed, so that this rank cannot save.

        After a crash, DeepSpeed's launcher sends SIGTERM to the remaining ranks and waits 30 s for each of them
        (launcher/launch.py, 0.19.8). They are blocked in a collective. Before `close`, no rank ends by itself.
        """
        return self._launcher is not None and self._launcher.is_running() \
            and _num_children(self._launcher) < self._ranks


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike with SIG_IGN, /proc lists the signal as handled, and launchers recognize a rank by this."""


def _ranks_of_launcher() -> tuple[int, psutil.Process | None]:
    """Return (number of ranks on this host, their parent process).

    The parent is None if there is only one rank, or if not all ranks are its children, as under other launchers.
    """
    size, parent = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), psutil.Process().parent()
    is_launcher = size > 1 and parent is not None and _num_children(parent) >= size
    return size, parent if is_launcher else None


def _num_children(parent: psutil.Process) -> int:
    """Return the number of running child processes."""
    with contextlib.suppress(psutil.Error):
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in parent.children())
    return 0
