"""Requests to save or stop a run, from signals and from files: all ranks act on them after the same step."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.errors import ConfigError

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Request:
    """What the ranks have agreed to do after a step."""

    stop: str = ""  # why the run saves and stops, such as "SIGTERM"; "": it continues
    save: bool = False  # save a checkpoint, and continue


class Requests:
    """Handler of the signals in SIGNALS. After a signal to any rank, `poll()` returns its name on all ranks.

    All ranks get the name at the same step. The step does not wait for communication: each call of `poll()` starts an
    all-reduce of the received signal's number, and the next call reads the result.

    Args:
        device: device of the all-reduce.
        report: called with one line when this rank first knows of a signal.
    """

    def __init__(self, device: torch.device, report: Callable[[str], None]) -> None:
        self._received = 0  # number of the first signal that this rank received
        self._report, self._reported = report, False
        self._rejection = ""  # why this rank cannot continue
        self._reduced = torch.zeros(2, dtype=torch.int32, device=device)  # number of a signal; 1 if a rank rejects
        self._result = self._reduced if device.type == "cpu" else torch.zeros(2, dtype=torch.int32).pin_memory()
        self._copied = None if device.type == "cpu" else get_accelerator().Event()
        self._start_all_reduce()
        self._wakeup = _exit_on_sigterm_after_crash()
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number  # keep SIGINT: after Ctrl-C, DeepSpeed's launcher also sends SIGTERM
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the run at once
        with contextlib.suppress(RuntimeError):  # the signal interrupted a print: `poll` will report it
            self._report_once(number)

    def _report_once(self, number: int) -> None:
        if not self._reported:
            self._report(f"{signal.Signals(number).name}: saving after the next step, then stopping "
                         "(Ctrl-C now: without saving)")
            self._reported = True

    def reject(self, line: str) -> None:
        """Make `poll` raise ConfigError on all ranks at the same step, without a save; may be called on any rank.

        The error of this rank has the text `line`.
        """
        self._rejection = self._rejection or line

    def _start_all_reduce(self) -> None:
        self._reduced[0], self._reduced[1] = self._received, int(self._rejection != "")
        self._work = dist.all_reduce(self._reduced, op=dist.ReduceOp.MAX, async_op=True)
        if self._copied is not None:
            self._work.wait()  # blocks the device's stream, not the host
            self._result.copy_(self._reduced, non_blocking=True)
            self._copied.record()

    def poll(self, step: int) -> Request:
        """Return the request that some rank had received by the previous call.

        All ranks must call this after each step (a collective), and all get the same result. Raises ConfigError on all
        ranks if some rank has called `reject`.
        """
        number, rejected = self._read_result()
        if rejected:
            raise ConfigError.from_line(self._rejection or "another rank has stopped the run: its output says why")
        self._start_all_reduce()
        if not number:
            return Request()
        self._report_once(number)
        return Request(stop=signal.Signals(number).name)

    def _read_result(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()  # waits for the copy queued at the previous step, not for the newest step
        else:
            self._work.wait()
        return list(self._result.tolist())

    def close(self) -> None:
        """Ignore further signals during shutdown, except a second Ctrl-C. All ranks must call this (a collective)."""
        self._read_result()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(-1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike with SIG_IGN, /proc lists the signal as handled, and launchers still recognize a rank."""


def _exit_on_sigterm_after_crash() -> socket.socket | None:
    """Make SIGTERM end this process at once if another rank of the same launcher has ended.

    After a crash, DeepSpeed's launcher sends SIGTERM to the remaining ranks and waits 30 s for each of them
    (launcher/launch.py, 0.19.8). The remaining ranks are blocked in a collective, where Python runs no signal handlers.
    A thread, which Python's wakeup file descriptor wakes, therefore ends the process.

    Returns a socket that must stay open. Returns None if the parent has fewer children than this host has ranks, as
    under other launchers, or if there is only one rank.
    """
    size, parent = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), psutil.Process().parent()
    if size == 1 or parent is None or _num_children(parent) < size:
        return None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGTERM and _num_children(parent) < size:
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    return writer


def _num_children(parent: psutil.Process) -> int:
    """Return the number of running child processes of the launcher."""
    with contextlib.suppress(psutil.Error):
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in parent.children())
    return 0
