"""Profile training steps with torch.profiler, and add up the time of each operator by kind."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from pretrain.bench.baselines.operator_kinds import (
    HOST,
    OPTIMIZER_STEP,
    TRAINING_STEP,
    bytes_moved,
    flops,
    kind_of,
    kind_of_kernel,
)


@dataclass
class _Range:
    """An operator or function in the profile of the training thread. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    shapes: list[list[int]]
    dtypes: list[str]
    callers: tuple[str, ...] = ()
    self_time: int = field(default=0, init=False)  # without the ranges inside it


def operator_times(step: Callable[[], Any], *, steps: int, vocab_size: int, cuda: bool) -> list[dict[str, Any]]:
    """Run and profile training steps. Return one row per operator and kind, with the sums over all steps.

    On a CPU the times add up to the time of the steps: the time of an operator does not include operators that it
    calls, and the rest is Python's. On a GPU the times are those of its kernels; the rest of the step is the host's.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities, record_shapes=not cuda) as profiler:
        start = time.perf_counter_ns()
        for _ in range(steps):
            with record_function(TRAINING_STEP):
                step()
        if cuda:
            torch.cuda.synchronize()
        wall_ns = time.perf_counter_ns() - start
    events = profiler.profiler.kineto_results.events()
    return _kernel_rows(events, wall_ns) if cuda else _operator_rows(events, vocab_size)


def named_optimizer_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `step` as one range of the profile."""
    def named(*arguments: Any, **settings: Any) -> Any:
        with record_function(OPTIMIZER_STEP):
            return step(*arguments, **settings)
    return named


def _operator_rows(events: Iterable[Any], vocab_size: int) -> list[dict[str, Any]]:
    rows = _Rows()
    for each in _nested(events):
        kind = kind_of(each.name, each.callers, each.shapes, vocab_size)
        moved = bytes_moved(each.name, each.shapes, each.dtypes) if kind != HOST else 0
        rows.add(kind, each.name, each.self_time, moved, flops(each.name, each.shapes))
    return rows.rows()


def _nested(events: Iterable[Any]) -> Iterator[_Range]:
    """Yield the ranges inside the training steps, with their own times and their callers."""
    cpu = [event for event in events if event.device_type() == DeviceType.CPU]
    threads = {event.start_thread_id() for event in cpu if event.name() == TRAINING_STEP}
    ranges = [_Range(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), event.shapes(),
                     event.dtypes()) for event in cpu if event.start_thread_id() in threads]
    open_ranges: list[_Range] = []
    for each in sorted(ranges, key=lambda found: (found.start, -found.end)):
        while open_ranges and open_ranges[-1].end <= each.start:
            yield open_ranges.pop()
        if not open_ranges and each.name != TRAINING_STEP:
            continue  # between two steps
        each.self_time = each.end - each.start
        if open_ranges:
            open_ranges[-1].self_time -= each.self_time
            each.callers = (*open_ranges[-1].callers, open_ranges[-1].name)
        open_ranges.append(each)
    yield from open_ranges


def _kernel_rows(events: Iterable[Any], wall_ns: int) -> list[dict[str, Any]]:
    rows, busy_ns = _Rows(), 0
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            rows.add(kind_of_kernel(event.name()), event.name(), event.duration_ns(), 0, 0)
            busy_ns += event.duration_ns()
    rows.add(HOST, "the GPU waits", max(wall_ns - busy_ns, 0), 0, 0)
    return rows.rows()


class _Rows:
    """Sums by kind and name."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, kind: str, name: str, time_ns: int, moved: int, operations: int) -> None:
        row = self._sums.setdefault((kind, name), {"kind": kind, "name": name, "calls": 0, "self_time_ms": 0.0,
                                                   "bytes": 0, "flops": 0})
        row["calls"] += 1
        row["self_time_ms"] += time_ns / 1e6
        row["bytes"] += moved
        row["flops"] += operations

    def rows(self) -> list[dict[str, Any]]:
        return list(self._sums.values())
