"""Time of the phases of a training step: forward, backward, reduction of gradients, optimizer, waiting in a pipeline.

On a device the times are those between events of its current stream, which are read in logged steps only. On a CPU they
are wall-clock times. Of each phase, the time between `begin_wait` and `end_wait` is known too, in which this rank waits
for others. Between two training steps there is a phase too, so that the phases are all of the time.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

FORWARD, BACKWARD, REDUCE, OPTIMIZER = "forward", "backward", "reduce", "optimizer"
WAIT = "wait"  # of a pipeline stage: sending and receiving activations and gradients
PHASES = (FORWARD, BACKWARD, REDUCE, OPTIMIZER, WAIT)
OTHER = "other"  # between training steps: data, logging, checks
_ALL = (*PHASES, OTHER)

_OF_INSTRUCTION = {
    schedule.LoadMicroBatch: FORWARD, schedule.ForwardPass: FORWARD, schedule.BackwardPass: BACKWARD,
    schedule.SendActivation: WAIT, schedule.RecvActivation: WAIT, schedule.SendGrad: WAIT, schedule.RecvGrad: WAIT,
    schedule.ReduceTiedGrads: REDUCE, schedule.ReduceGrads: REDUCE, schedule.OptimizerStep: OPTIMIZER,
}


class _Event(Protocol):
    """A point in time on the device: torch.cuda.Event, or its counterpart of another device."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class HostEvent:
    """The interface of torch.cuda.Event, with the wall-clock time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Return the time from this event to `end_event` in milliseconds."""
        return (end_event._seconds - self._seconds) * 1e3


def new_event() -> Any:
    """Return an event with a time, of the device of this process or of the host."""
    accelerator = get_accelerator()
    return HostEvent() if accelerator.device_name() == "cpu" else accelerator.Event(enable_timing=True)


class PhaseTimers:
    """Adds up the time of each phase. A phase ends where the next one begins.

    Args:
        new_event: makes an event.
    """

    def __init__(self, new_event: Callable[[], _Event]) -> None:
        self._new_event = new_event
        # (phase that begins or continues here, whether the rank waits from here on, time), not yet added up
        self._marks: deque[tuple[str, bool, _Event]] = deque()
        self._free: list[_Event] = []
        self._milliseconds = dict.fromkeys(_ALL, 0.0)
        self._waited = dict.fromkeys(_ALL, 0.0)
        self.taken_ms = dict.fromkeys(_ALL, 0.0)  # the times that take_ms has returned last
        self.waited_ms = dict.fromkeys(_ALL, 0.0)  # of them, waiting for others
        self.current = ""  # "": no phase, before the first step and while the timers are paused
        self._in_step = self._waits = False

    @contextlib.contextmanager
    def training_step(self) -> Iterator[None]:
        """Phases of a step are entered only inside of this context: an evaluation uses the same functions."""
        self._in_step = True
        try:
            yield
            self.enter(OTHER)
        finally:
            self._in_step, self.current, self._waits = False, OTHER, False
        self._add_up(wait=False)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing inside of this context, which is outside of training steps."""
        before, self.current = self.current, ""
        if before:
            self._mark()
        try:
            yield
        finally:
            self.current = before
            if before:
                self._mark()

    def enter(self, phase: str) -> None:
        """Begin a phase. Does not wait for the device."""
        if not self._in_step or phase == self.current:
            return
        self.current = phase
        self._mark()

    def begin_wait(self) -> bool:
        """Begin to wait for other ranks, inside of a phase. Returns False if there is no phase, or if it waits."""
        if not self.current or self._waits:
            return False
        self._waits = True
        self._mark()
        return True

    def end_wait(self) -> None:
        """Continue the phase. Called once after each call of begin_wait that returned True."""
        self._waits = False
        self._mark()

    def _mark(self) -> None:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._marks.append((self.current, self._waits, event))

    def take_ms(self) -> dict[str, float]:
        """Return the milliseconds of each phase since the last call, until now. Waits for the device."""
        if self.current:
            self._mark()
        self._add_up(wait=True)
        self.waited_ms, self._waited = self._waited, dict.fromkeys(_ALL, 0.0)
        self.taken_ms, self._milliseconds = self._milliseconds, dict.fromkeys(_ALL, 0.0)
        return self.taken_ms

    def restart(self) -> None:
        """Forget all times until now. Waits for the device."""
        self.take_ms()

    def _add_up(self, *, wait: bool) -> None:
        """Add the times between marks that the device has reached: so few events exist, however rare logged steps are.

        The last mark remains: a later one ends its phase.
        """
        while len(self._marks) > 1:
            (phase, waits, start), (_, _, end) = self._marks[0], self._marks[1]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            if phase:
                elapsed = start.elapsed_time(end)
                self._milliseconds[phase] += elapsed
                if waits:
                    self._waited[phase] += elapsed
            self._free.append(start)
            self._marks.popleft()


def time_phases(engine: DeepSpeedEngine) -> PhaseTimers:
    """Return timers of the engine's training steps from now on. Call it once, after the patches are applied."""
    timers = PhaseTimers(new_event)
    if isinstance(engine, PipelineEngine):
        engine._INSTRUCTION_MAP = {instruction: _timed(timers, _OF_INSTRUCTION.get(instruction, ""), execute)
                                   for instruction, execute in engine._INSTRUCTION_MAP.items()}
    elif not overlaps_reduction(engine):
        engine.allreduce_gradients = _reduction(timers, engine.allreduce_gradients)
    return timers


def overlaps_reduction(engine: DeepSpeedEngine) -> bool:
    """Return whether gradients are reduced during the backward pass, so that the reduction has no time of its own.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py): ZeRO-2 and ZeRO-3 reduce a bucket as soon as it is
    full; ZeRO-1 does so with overlap_comm.
    """
    return engine.zero_optimization_stage() >= 2 or bool(engine.zero_optimization() and engine.zero_overlap_comm())


def _timed(timers: PhaseTimers, phase: str, execute: Callable[..., None]) -> Callable[..., None]:
    """Return the instruction as a function that begins a phase. DeepSpeed binds it to the engine before each call."""
    def timed(engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
        timers.enter(phase)
        execute(engine, *args, **kwargs)

    return timed


def _reduction(timers: PhaseTimers, reduce: Callable[..., None]) -> Callable[..., None]:
    """Return DeepSpeedEngine.allreduce_gradients, which `backward` calls, as a phase of its own."""
    def timed(*args: Any, **kwargs: Any) -> None:
        before = timers.current
        timers.enter(REDUCE)
        reduce(*args, **kwargs)
        timers.enter(before)

    return timed


class _NoTimers(PhaseTimers):
    def enter(self, phase: str) -> None:
        pass


NO_TIMERS = _NoTimers(HostEvent)  # of an engine whose phases are not measured
