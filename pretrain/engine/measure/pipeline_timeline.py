"""Start and end of every instruction of DeepSpeed's pipeline schedule on this rank, while a timeline is recorded."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.distributed.collectives import gather
from pretrain.engine.measure.phases import HostEvent

_CLOCK_READINGS = 9


@dataclass(frozen=True)
class Instruction:
    """One executed instruction. Times are seconds of rank 0's clock."""

    step: int
    name: str  # class name in deepspeed/runtime/pipe/schedule.py, such as "ForwardPass"
    index: int  # how many instructions of this name came before it in the step: the micro-batch, for most
    start: float
    end: float


class InstructionRecorder:
    """Records the instructions of an engine from now on, until `stop`. Evaluations are not recorded.

    On a CPU the times are those of the host's clock. On a device they are those of events in its current stream, which
    the host does not wait for before `stop`; sends and receives end when the transfer is complete.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._step = 0
        self._engine, self._original = engine, engine._INSTRUCTION_MAP
        accelerator = get_accelerator()
        on_host = accelerator.device_name() == "cpu"
        self._new_event: Callable[[], Any] = HostEvent if on_host else lambda: accelerator.Event(enable_timing=True)
        self._marks: list[tuple[int, str, Any, Any]] = []  # (step, name, event at the start, event at the end)
        accelerator.synchronize()
        self._origin_seconds, self._origin = time.perf_counter(), self._mark()
        engine._INSTRUCTION_MAP = {instruction: self._recorded(instruction.__name__, execute)
                                   for instruction, execute in self._original.items()}

    def begin_step(self, step: int) -> None:
        """Call this before each step. After a rollback, the steps that are trained again replace the earlier ones."""
        self._step = step
        self._marks = [mark for mark in self._marks if mark[0] < step]

    def stop(self) -> list[Instruction]:
        """Restore the engine. Return this rank's instructions, with times of rank 0's clock; collective."""
        self._engine._INSTRUCTION_MAP = self._original
        get_accelerator().synchronize()
        shift = self._origin_seconds - clock_offset()
        counts: dict[tuple[int, str], int] = {}
        instructions = []
        for step, name, start, end in self._marks:
            index = counts.get((step, name), 0)
            counts[step, name] = index + 1
            instructions.append(Instruction(step, name, index, shift + self._origin.elapsed_time(start) / 1e3,
                                            shift + self._origin.elapsed_time(end) / 1e3))
        return instructions

    def _recorded(self, name: str, execute: Callable[..., None]) -> Callable[..., None]:
        """Return the instruction as a function that records it. DeepSpeed binds it to the engine before each call."""
        def recorded(engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
            if not engine.module.training:
                execute(engine, *args, **kwargs)
                return
            start = self._mark()
            execute(engine, *args, **kwargs)
            self._marks.append((self._step, name, start, self._mark()))

        return recorded

    def _mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event


def clock_offset() -> float:
    """Return by how many seconds this host's clock is ahead of rank 0's; collective.

    Processes of one host read the same clock. Between hosts, all ranks read their clocks after a barrier, several
    times; the median difference from rank 0 is off by about the time in which a barrier releases its ranks.
    """
    hosts = gather(socket.gethostname())
    if len(set(hosts)) == 1:
        return 0.0
    readings = []
    for _ in range(_CLOCK_READINGS):
        dist.barrier()
        get_accelerator().synchronize()
        readings.append(time.perf_counter())
    all_readings = gather(readings)
    own = hosts[dist.get_rank()]
    if own == hosts[0]:
        return 0.0
    first = all_readings[hosts.index(own)]  # one offset for all ranks of a host
    return median(mine - reference for mine, reference in zip(first, all_readings[0], strict=True))
