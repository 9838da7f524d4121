"""Signals that ask a run to save and end: a scheduler's before its time limit, an operator's, Ctrl-C."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

STOPPED = 75  # exit code: saved, start me again (EX_TEMPFAIL of sysexits.h)
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Stop:
    """From now on a signal to any rank lets all ranks stop after the same step.

    No step waits for it: each begins an all-reduce of what this rank has heard, on the host, and the next one reads it.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._heard = 0
        self._said = torch.zeros(1, dtype=torch.int32)
        self._work = dist.all_reduce(self._said, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the run at once

    def requested(self) -> str:
        """The name of the signal that a rank had heard when it last asked, "" for none; the same on every rank.

        Collective: once a step.
        """
        self._work.wait()
        number = int(self._said)
        self._said = torch.tensor([self._heard], dtype=torch.int32)
        self._work = dist.all_reduce(self._said, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return signal.Signals(number).name if number else ""

    def close(self) -> None:
        """Signals do again what they did before. Collective."""
        self._work.wait()
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
