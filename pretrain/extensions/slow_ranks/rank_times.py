"""The times of each rank in the steps between two logged ones: measured, gathered, and kept in RUN/rank_times.jsonl.

The times of a rank are those in which it did not wait for other ranks, and `reduce_wait`, in which it waited inside of
collective operations: reductions, all-gathers, and transfers between pipeline stages. Of ranks that train together, the
slowest one has the largest `own` and the smallest `reduce_wait`; the others wait for it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.monitor.read_run_folder import newest_start_number

# the keys of "ms", each a list by rank: milliseconds of a step, mean over the steps of the row
TIMES = {
    "data": "waiting for data",
    "forward": "forward pass, without waiting for other ranks",
    "backward": "backward pass, without waiting for other ranks",
    "reduce_wait": "waiting in collective operations and in transfers between pipeline stages",
    "optimizer": "clipping and update, without waiting for other ranks",
    "other": "between the steps, without waiting for other ranks: logging, checks, requests",
    "own": "all of it but `reduce_wait`: nothing that a rank does is in no key",
}
# the keys of "load": what the kernel counted for the thread that trains, of a step, mean over the steps of the row
LOAD = {
    "cpu": "ms in which it computed",
    "run_delay": "ms in which it was ready to run, while others had the CPU",
    "throttled": "ms in which its control group was over its CPU quota",
    "read_bytes": "bytes that its process read from a disk",
    "gpu_slowed": "fraction of the readings at which its GPU ran below its clock because of heat or power",
}
_KEYS = (*TIMES, *LOAD)
NUM_VALUES = len(_KEYS)  # values of a rank, in the order of TIMES and LOAD
_MOST_NUMBERS = 64  # ranks that each logged step gets a row for; with more ranks, a row has the mean of several


@dataclass(frozen=True)
class RankTimes:
    """The times of all ranks in the steps since the last logged one."""

    step: int  # the last of the steps
    steps: int
    step_ms: float  # mean time of a step
    ms: Mapping[str, np.ndarray]  # keys of TIMES -> [ranks]
    load: Mapping[str, np.ndarray]  # keys of LOAD -> [ranks]
    is_partial: bool = False  # not all of the time belongs to complete steps

    def row(self) -> dict[str, Any]:
        """Return the row of rank_times.jsonl."""
        return {"step": self.step, "steps": self.steps, "time": time.time(), "step_ms": round(self.step_ms, 2),
                "ms": {key: _rounded(self.ms[key]) for key in TIMES},
                "load": {key: _rounded(self.load[key]) for key in LOAD if np.any(self.load[key] > 0)}}


def _rounded(values: np.ndarray) -> list[float | None]:
    return [round(value, 2) if np.isfinite(value) else None for value in values.tolist()]


def rank_times(values: np.ndarray, *, step: int, steps: int, step_ms: float, is_partial: bool = False) -> RankTimes:
    """Return the times of all ranks. `values`: [ranks, NUM_VALUES], the results of OwnTimes.take."""
    columns = dict(zip(_KEYS, values.T, strict=True))
    return RankTimes(step, steps, step_ms, {key: columns[key] for key in TIMES}, {key: columns[key] for key in LOAD},
                     is_partial)


def mean_times(parts: Sequence[RankTimes]) -> RankTimes:
    """Return the times of consecutive rows as one row: means over their steps."""
    steps = sum(part.steps for part in parts)
    weights = [part.steps / steps for part in parts]

    def mean(values: Sequence[Any]) -> Any:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    return RankTimes(parts[-1].step, steps, mean([part.step_ms for part in parts]),
                     {key: mean([part.ms[key] for part in parts]) for key in TIMES},
                     {key: mean([part.load[key] for part in parts]) for key in LOAD})


class RankTimesLog:
    """Makes the rows of rank_times.jsonl: first the header of this start, then rows.

    With many ranks, a row has the mean of several logged steps, so that the file does not become larger.
    """

    def __init__(self, run: Path, hosts: Sequence[str], coordinates: Sequence[Mapping[str, int]], *,
                 first_step: int) -> None:
        self._run, self._first_step = run, first_step
        self._hosts, self._coordinates = list(hosts), [dict(each) for each in coordinates]
        self._parts: list[RankTimes] = []
        self._every = -(-len(self._hosts) // _MOST_NUMBERS)
        self._has_header = False

    def rows(self, times: RankTimes) -> list[dict[str, Any]]:
        """Add the times of a logged step. Returns the rows to append to the file."""
        self._parts.append(times)
        if len(self._parts) < self._every:
            return []
        row, self._parts = mean_times(self._parts).row(), []
        header = [] if self._has_header else [self._header()]
        self._has_header = True
        return [*header, row]

    def _header(self) -> dict[str, Any]:
        return {"start": newest_start_number(self._run), "time": time.time(), "step": self._first_step,
                "hosts": self._hosts, "coordinates": self._coordinates}
