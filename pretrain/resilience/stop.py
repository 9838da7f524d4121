"""Signals that ask a run to save and end: a scheduler's before its time limit, an operator's, Ctrl-C."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Stop:
    """From now on a signal to any rank lets all ranks stop after the same step.

    No step waits for it: each begins an all-reduce of what this rank has heard, and the next one reads the outcome.
    `report` gets one line as soon as this rank knows of the signal.
    """

    def __init__(self, device: torch.device, report: Callable[[str], None]) -> None:
        self._heard = 0
        self._report, self._reported = report, False
        self._said = torch.zeros(1, dtype=torch.int32, device=device)
        self._read = self._said if device.type == "cpu" else torch.zeros(1, dtype=torch.int32).pin_memory()
        self._copied = None if device.type == "cpu" else get_accelerator().Event()
        self._say()
        self._wakeup = _end_with_siblings()
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = self._heard or number  # DeepSpeed's launcher sends SIGTERM after the terminal's SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the run at once
        with contextlib.suppress(RuntimeError):  # the signal came while a line was being printed: `requested` says it
            self._report_once(number)

    def _report_once(self, number: int) -> None:
        if not self._reported:
            self._report(f"{signal.Signals(number).name}: saving after the next step, then stopping "
                         "(Ctrl-C now: without saving)")
            self._reported = True

    def _say(self) -> None:
        self._said.fill_(self._heard)
        self._work = dist.all_reduce(self._said, op=dist.ReduceOp.MAX, async_op=True)
        if self._copied is not None:
            self._work.wait()  # the device's queue does, not the host
            self._read.copy_(self._said, non_blocking=True)
            self._copied.record()

    def requested(self) -> str:
        """The name of the signal that a rank had heard when it last asked, "" for none; the same on every rank.

        Collective: once a step.
        """
        number = self._answer()
        self._say()
        if not number:
            return ""
        self._report_once(number)
        return signal.Signals(number).name

    def _answer(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()  # with what was queued before the newest step
        else:
            self._work.wait()
        return int(self._read)

    def close(self) -> None:
        """The end has begun, and no signal disturbs it but a second Ctrl-C. Collective."""
        self._answer()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(-1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, so that a launcher still sees that this process expects the signal (SIG_IGN does not say so)."""


def _end_with_siblings() -> socket.socket | None:
    """SIGTERM ends this process at once if a process that the same launcher started has ended: then it is no request.

    DeepSpeed's launcher sends it to the ranks beside one that crashed, and waits 30 s for each (launcher/launch.py,
    0.19.8); they wait for the dead one in a collective, where Python's own handlers are never called. Returns what must
    stay open.
    """
    size, parent = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), psutil.Process().parent()
    if size == 1 or parent is None or _ranks_of(parent) < size:  # another kind of launcher
        return None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGTERM and _ranks_of(parent) < size:
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    return writer


def _ranks_of(parent: psutil.Process) -> int:
    """How many processes the launcher has that run."""
    with contextlib.suppress(psutil.Error):
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in parent.children())
    return 0
