"""RunTable: the rows of metrics.jsonl as columns, events and restarts. It reads only what was appended.

`events_and_crashes` adds the starts of the run that ended without a report: from the supervisor's log, and from events
that are missing.
"""

import contextlib
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import FINISHED, GUARD, HANG, REJECTED, STOPPED, ConfigError, file_errors
from pretrain.monitor.read_run_folder import Tail, read_starts
from pretrain.paths import status_of

_MAX_KEYS = 100  # columns; the rows of a damaged or foreign file may have any number of keys
_MAX_SPLITS = 50
_LISTS = ("events", "restarts")  # files whose rows are kept as they are
_LARGEST_STEP = 2.0**53  # larger whole numbers are not exact as float64, in Python and in a browser
_KINDS = {None: "not_started", REJECTED: "rejected", GUARD: "guard", HANG: "hang"}


class Columns:
    """Rows as one float64 column per key. A value that is missing, null or not a number is NaN."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._values: dict[str, array[float]] = {"step": array("d"), "line": array("d")}

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append rows that have a step and the number of their line in the file."""
        for key in sorted(set().union(*rows) - self._values.keys()):
            if len(self._values) < _MAX_KEYS and any(_is_number(row.get(key)) for row in rows):
                self._values[key] = array("d", [math.nan]) * self.num_rows
        for key, column in self._values.items():
            column.frombytes(_as_floats(_values_of(rows, key)).tobytes())
        self.num_rows += len(rows)

    def column(self, key: str, first: int = 0) -> np.ndarray:
        """Return a copy of the column from row `first` on. A key that no row has gives NaN."""
        if key not in self._values:
            return np.full(self.num_rows - first, math.nan)
        return np.array(self._values[key][first:], dtype=np.float64)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _values_of(rows: list[dict[str, Any]], key: str) -> list[Any]:
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        return [row.get(key) for row in rows]


def _as_floats(values: list[Any]) -> np.ndarray:
    if set(map(type, values)) <= {float, int, type(None)}:
        with contextlib.suppress(OverflowError):  # an integer with hundreds of digits
            floats = np.array(values, dtype=np.float64)  # null becomes NaN
            return np.where(np.isfinite(floats), floats, math.nan)
    return np.array([as_float(value) for value in values], dtype=np.float64)


def as_float(value: object) -> float:
    """Return a finite number as it is, and NaN for anything else."""
    try:
        number = float(value) if _is_number(value) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def number_or_none(value: object) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    number = as_float(value)
    return None if math.isnan(number) else number


@dataclass
class RunTable:
    """Contents of a run folder: training and evaluation rows, events, restarts, records of run.json.

    Raises ConfigError if the folder has neither a run.json nor a metrics.jsonl, or if a file cannot be read.
    """

    run: Path
    generation: int = 0  # grows when a file was replaced, so that earlier rows are no longer valid
    training: Columns = field(default_factory=Columns)
    evaluations: dict[str, Columns] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)  # a supervisor's log
    starts: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""  # why `starts` is empty

    def __post_init__(self) -> None:
        if not any((self.run / name).is_file() for name in ("run.json", "metrics.jsonl")):
            raise ConfigError(str(self.run), problem="this is not a run folder: it has no run.json and no "
                              "metrics.jsonl", remedy="Name the folder that the run has in --save")
        self._metrics, *self._others = (Tail(self.run / f"{name}.jsonl") for name in ("metrics", *_LISTS))
        self._record: tuple[int, int] | None = None  # time and size of run.json when it was read
        self.update()
        self.generation = 0

    @property
    def num_lines(self) -> int:
        """Number of lines of metrics.jsonl that were read."""
        return self._metrics.lines

    def update(self) -> None:
        """Read what was appended since the last call."""
        with file_errors(self.run, "its files cannot be read ({})"):
            if any(file.was_replaced() for file in (self._metrics, *self._others)):
                self._begin_again()
            for block in self._metrics.blocks():
                self._add(block)
            for name, file in zip(_LISTS, self._others, strict=True):
                for block in file.blocks():
                    getattr(self, name).extend(row for _, row in block)
        self._read_starts()

    def _begin_again(self) -> None:
        self._metrics, *self._others = (Tail(file.path) for file in (self._metrics, *self._others))
        self.training, self.evaluations = Columns(), {}
        self.events, self.restarts = [], []
        self.generation += 1

    def _add(self, block: list[tuple[int, dict[str, Any]]]) -> None:
        training: list[dict[str, Any]] = []
        evaluations: dict[str, list[dict[str, Any]]] = {}
        for line, row in block:
            if not 0 <= as_float(row.get("step")) <= _LARGEST_STEP:  # False for NaN
                continue
            row["line"] = line
            if "loss" in row:
                training.append(row)
            elif isinstance(split := row.get("split"), str):
                evaluations.setdefault(split, []).append(row)
        self.training.append(training)
        for split, rows in evaluations.items():
            if split in self.evaluations or len(self.evaluations) < _MAX_SPLITS:
                self.evaluations.setdefault(split, Columns()).append(rows)

    def _read_starts(self) -> None:
        path = self.run / "run.json"
        status = status_of(path)
        record = (status.st_mtime_ns, status.st_size) if status else None
        if record == self._record and (record is not None or self.problem):
            return
        try:
            self.starts, self.problem = read_starts(self.run), ""
        except ConfigError as error:
            self.starts, self.problem = [], str(error)
        self._record, self.generation = record, self.generation + 1


def kept_rows(training: Columns) -> np.ndarray:
    """Return a mask of the rows that are the newest of their steps, as `newest_path` selects them.

    A resume or a rollback returns to an earlier step, and then trains later steps again.
    """
    return _before(training.column("step"))


def _before(steps: np.ndarray) -> np.ndarray:
    """Return whether each step is less than all that follow."""
    return steps < _later_minimum(steps)[1:]


def _later_minimum(steps: np.ndarray) -> np.ndarray:
    """Return, for each row and for the end, the lowest step from this row on."""
    return np.minimum.accumulate(np.append(steps, math.inf)[::-1])[::-1]


def kept_evaluations(evaluations: Columns, training: Columns) -> np.ndarray:
    """Return a mask of the evaluations of which no step was trained again, and no evaluation was repeated, later."""
    steps = evaluations.column("step")
    following = np.searchsorted(training.column("line"), evaluations.column("line"))
    return _before(steps) & (steps < _later_minimum(training.column("step"))[following])


@dataclass(frozen=True)
class Curves:
    """Points of several curves with common positions on the x axis.

    If rows were reduced, `values` has means, and `low` and `high` have the minimum and the maximum of those keys whose
    values differ within a point.
    """

    values: dict[str, np.ndarray]
    low: dict[str, np.ndarray] = field(default_factory=dict)
    high: dict[str, np.ndarray] = field(default_factory=dict)


def events_and_crashes(table: RunTable) -> list[dict[str, Any]]:
    """Return the events, and crashes as further events, in the order of their times.

    Crashes are in the supervisor's log, or starts after which no end was reported. An event without a time follows its
    predecessor.
    """
    rows, latest = [], -math.inf
    for event in table.events:
        when = as_float(event.get("time"))
        latest = max(latest, when) if math.isfinite(when) else latest
        rows.append((latest, event))
    rows += [(as_float(row["time"]), row) for row in (*_supervised(table), *_unreported(table))]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _supervised(table: RunTable) -> Iterable[dict[str, Any]]:
    for row in table.restarts:
        code, reason = row.get("exit_code"), str(row.get("reason") or "")
        end = as_float(row.get("time")) + as_float(row.get("wall_seconds"))
        if "start" not in row or not math.isfinite(end) or code in (FINISHED, STOPPED):
            continue
        kind = _KINDS.get(code, "crash") if isinstance(code, (int, type(None))) else "crash"
        # the run's own event says more
        if kind in ("hang", "guard") and any(event.get("event") in ("hang", "stop") and as_float(row["time"])
                                             <= as_float(event.get("time")) <= end for event in table.events):
            continue
        kept = as_float(row.get("kept_step"))
        saved = f"; newest checkpoint: step {int(kept):,}" if kind in ("crash", "hang") and kept >= 0 else ""
        yield {"event": kind, "step": row.get("last_step"), "time": end,
               "reason": reason.removeprefix("crash: ").removeprefix("hang: ") + saved}


def _unreported(table: RunTable) -> Iterable[dict[str, Any]]:
    """Yield the starts, except the newest, that neither reported an end nor are in the supervisor's log."""
    known = [(as_float(row.get("time")), as_float(row.get("time")) + as_float(row.get("wall_seconds")))
             for row in table.restarts if "start" in row]
    times, steps = table.training.column("time"), table.training.column("step")
    began: dict[str, Any] | None = None
    for event in table.events:
        kind, when = event.get("event"), as_float(event.get("time"))
        if kind == "start":
            first = math.nan if began is None else as_float(began.get("time"))
            if began is not None and not any(low <= first <= high for low, high in known):
                rows = np.flatnonzero((times >= first) & (times < when))
                step = int(steps[rows[-1]]) if len(rows) else began.get("step")
                resumed = as_float(event.get("step"))
                again = f"; resumed from step {int(resumed):,}" if math.isfinite(resumed) else ""
                yield {"event": "crash", "step": step, "time": float(times[rows[-1]]) if len(rows) else first,
                       "reason": f"it ended without a report (killed, out of memory, or power loss){again}"}
            began = event
        elif kind in ("stop", "hang"):
            began = None
