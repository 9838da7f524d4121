"""The data of the page: curves, events, an overview and the configuration of each run, as JSON values.

Many rows are reduced to a few points with the minimum, maximum and mean.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pretrain.active_extensions import extensions, functions
from pretrain.analysis.incidents import incidents_of
from pretrain.analysis.run_table import (
    Columns,
    Curves,
    RunTable,
    as_float,
    events_and_crashes,
    kept_evaluations,
    kept_rows,
    number_or_none,
)
from pretrain.analysis.summary import expected_curve, hints_of, newest_comparison
from pretrain.errors import escape_controls
from pretrain.extension import Section
from pretrain.extensions.report.compare import as_text, changes_between, differences, run_names, settings

_MAX_SEGMENTS = 100  # segments of abandoned rows; the newest are kept
_DIGITS = 7  # significant digits of the points of reduced curves
MAX_POINTS = 6000  # points of each curve, over all runs: the page remains below a few MB
_MIN_POINTS = 400
_MAX_EVENTS = 200  # events of a kind
_MAX_STARTS = 200
_MAX_INCIDENTS = 200
_LONGEST_REASON = 300  # characters
_NEWEST_ROWS = 50  # rows whose speed the overview shows
_EVENT_KEYS = {"time", "event", "step", "reason"}


def reduce_rows(columns: dict[str, np.ndarray], limit: int) -> Curves:
    """Return the rows themselves if there are at most `limit`, else at most a quarter as many buckets of rows.

    Three quarters of the buckets have the same number of rows. The others become smaller towards the first row, so that
    a logarithmic axis shows the start of a run.
    """
    num_rows = len(next(iter(columns.values()), ()))
    if num_rows <= limit:
        return Curves(columns)
    even, fine = max(limit * 3 // 16, 1), max(limit // 16, 1)
    starts = np.unique(np.concatenate([np.linspace(0, num_rows, even, endpoint=False),
                                       np.geomspace(1, num_rows, fine, endpoint=False) - 1]).astype(np.int64))
    curves = Curves({})
    for key, column in columns.items():
        low, mean, high = _reduce_column(column, starts)
        curves.values[key] = mean
        if np.any((low < high)[np.isfinite(mean)]):
            curves.low[key], curves.high[key] = low, high
    return curves


def _reduce_column(column: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return minimum, mean and maximum of each bucket without its NaN; NaN if it has only NaN."""
    finite = np.isfinite(column)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), math.nan), where=counts > 0)
    low, high = np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)
    return low, np.clip(mean, low, high), high  # the rounding of a sum must not leave the range


def reduce_segments(columns: dict[str, np.ndarray], rows: np.ndarray, limit: int) -> Curves:
    """Return the rows with the numbers `rows` as curves with a gap (NaN) after each segment of consecutive rows."""
    if len(rows) == 0:
        return Curves({})
    segments = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)[-_MAX_SEGMENTS:]
    total = sum(map(len, segments))
    parts = [reduce_rows({key: column[segment] for key, column in columns.items()},
                         max(limit * len(segment) // total, 8)) for segment in segments]
    gap = np.array([math.nan])
    return Curves({key: np.concatenate([part for curves in parts for part in (curves.values[key], gap)])
                   for key in columns})


def as_numbers(values: np.ndarray, *, rounded: bool) -> list[float | int | None]:
    """Return values for JSON: null for NaN, and whole numbers without a decimal point."""
    numbers: list[float | int | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            numbers.append(None)
            continue
        number = float(f"{value:.{_DIGITS}g}") if rounded else value
        numbers.append(int(number) if number.is_integer() and abs(number) < 2**53 else number)
    return numbers


class ShownRun(RunTable):
    """A run folder, and the sections that extensions show of it. A section whose files cannot be read is left out."""

    def __post_init__(self) -> None:
        self._sections: dict[str, Section] = {each.name: section(self.run) for each, section in functions("section")}
        self._unreadable: set[str] = set()
        super().__post_init__()

    def update(self) -> None:
        """Read what was appended since the last call."""
        super().update()
        self._unreadable.clear()
        for name, section in self._sections.items():
            try:
                section.update()
            except OSError:
                self._unreadable.add(name)

    def state(self) -> str:
        """Return a text that changes when the files of a section have changed."""
        return ".".join(section.state() for section in self._sections.values())

    def sections(self) -> dict[str, Any]:
        """Return the data of the sections by extension."""
        found = {name: section.data() for name, section in self._sections.items() if name not in self._unreadable}
        return {name: data for name, data in found.items() if data}


def page_data(tables: Sequence[ShownRun], *, watch: bool) -> dict[str, Any]:
    """Return everything that the page shows, as JSON values."""
    limit, names = points_per_run(len(tables)), run_names([table.run for table in tables])
    runs = [{"name": name, "path": str(table.run), **run_data(table, limit)}
            for name, table in zip(names, tables, strict=True)]
    changed = [[row.section, row.key, *row.values] for row in differences([_newest_record(table) for table in tables])]
    return {"runs": runs, "differences": changed, "extension_events": _extension_events(),
            "time": time.time(), "watch": watch, "state": state_of(tables)}


def _extension_events() -> dict[str, int]:
    """Return event of an extension -> index of EVENT_STYLES in page/series.js.

    0 is a problem that lasts, 1 one that is over at once, and 2 the end of a problem.
    """
    found: dict[str, int] = {}
    for each in extensions():
        for event, problem in each.problems.items():
            found |= {end: 2 for end in problem.over or () if end in each.events}
            found[event] = 1 if problem.over is None else 0
    return found


def state_of(tables: Sequence[ShownRun]) -> str:
    """Return a text that changes when any file of the runs has changed."""
    return "-".join(f"{table.generation}.{table.num_lines}.{len(table.events)}.{len(table.restarts)}.{table.state()}"
                    for table in tables)


def points_per_run(num_runs: int) -> int:
    """Return how many rows of a run the page holds one by one; more rows are reduced."""
    return max(MAX_POINTS // num_runs, _MIN_POINTS)


def run_data(table: ShownRun, limit: int) -> dict[str, Any]:
    """Return everything that the page shows of one run."""
    columns, kept = _with_positions(table, table.training), kept_rows(table.training)
    curves = reduce_rows({key: column[kept] for key, column in columns.items()}, limit)
    abandoned = reduce_segments(columns, np.flatnonzero(~kept), limit // 4)
    is_reduced = bool(kept.sum() > limit)
    evaluations, abandoned_evaluations = {}, {}
    for split, rows in table.evaluations.items():
        values, newest = _with_positions(table, rows), kept_evaluations(rows, table.training)
        evaluations[split] = curves_data(reduce_rows({key: column[newest] for key, column in values.items()}, limit))
        old = reduce_rows({key: column[~newest] for key, column in values.items()}, limit // 4)
        abandoned_evaluations[split] = curves_data(old)
    return {
        "overview": overview(table), "note": escape_controls(_flags(table).get("note") or ""),
        "reduced": is_reduced, "rows": table.training.num_rows,
        "abandoned_rows": int((~kept).sum()), "training": curves_data(curves, rounded=is_reduced),
        "abandoned": curves_data(abandoned, rounded=is_reduced), "evaluations": evaluations,
        "abandoned_evaluations": abandoned_evaluations, "expected": curves_data(expected_curve(table, curves)),
        **_events(table), "incidents": _incidents_data(table), "sections": table.sections(),
        "problem": table.problem, "hints": list(map(str, hints_of(table))), "starts": _starts_data(table),
        "settings": [[section, key, value] for (section, key), value in settings(_newest_record(table)).items()],
    }


def _newest_record(table: RunTable) -> dict[str, Any]:
    return table.starts[-1] if table.starts else {}


def _flags(table: RunTable) -> dict[str, Any]:
    return _newest_record(table).get("flags") or {}


def _starts_data(table: RunTable) -> list[dict[str, Any]]:
    """Return the newest starts: when, and what changed compared with the start before."""
    starts = table.starts[-_MAX_STARTS:]
    return [{"time": as_numbers(np.array([as_float(start.get("time"))]), rounded=False)[0],
             "changes": [[change.section, change.key, *change.values] for change in changes]}
            for start, changes in zip(starts, changes_between(starts), strict=True)]


def curves_data(curves: Curves, *, rounded: bool = False) -> dict[str, dict[str, list[Any]]]:
    """Return the curves that have at least one value."""
    shown = [key for key, column in curves.values.items() if key != "line" and np.any(np.isfinite(column))]
    return {name: {key: as_numbers(part[key], rounded=rounded) for key in shown if key in part}
            for name, part in (("values", curves.values), ("low", curves.low), ("high", curves.high))}


def _start_time(table: RunTable) -> float:
    """Return the time of the first start; NaN if no row has one."""
    known = [as_float(row.get("time")) for row in (*table.starts[:1], *table.events[:1])]
    known += table.training.column("time")[:1].tolist()
    return min((time for time in known if math.isfinite(time)), default=math.nan)


def _with_positions(table: RunTable, rows: Columns) -> dict[str, np.ndarray]:
    """Return all columns, also of the x axis: `consumed_tokens`, and `elapsed`, in seconds since the first start.

    Evaluations have no number of tokens.
    """
    columns = {key: rows.column(key) for key in rows.keys}
    if "consumed_tokens" not in columns:
        columns["consumed_tokens"] = _at_steps(table, columns["step"], table.training.column("consumed_tokens"))
    columns["elapsed"] = columns.pop("time", np.full(rows.num_rows, math.nan)) - _start_time(table)
    return columns


def _at_steps(table: RunTable, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return values of the training rows at other steps, interpolated between the newest rows of the steps."""
    known = kept_rows(table.training) & np.isfinite(values)
    if not known.any():
        return np.full(len(steps), math.nan)
    return np.interp(steps, [0, *table.training.column("step")[known]], [0, *values[known]])


def _kind(event: dict[str, Any]) -> str:
    """Return the name of the event, or "finished" for the end of a run that trained all steps."""
    if event.get("event") == "stop" and event.get("reason") == "finished":
        return "finished"
    return str(event.get("event"))[:40]


def _events(table: RunTable) -> dict[str, Any]:
    """Return [seconds since the start, step, tokens, kind, text] of events and crashes, and how many of each kind.

    A number that is not known is null. Of a kind with very many events, evenly spaced ones are returned.
    """
    every, by_kind = events_and_crashes(table), dict[str, list[int]]()
    for number, event in enumerate(every):
        by_kind.setdefault(_kind(event), []).append(number)
    events = [every[number] for number in sorted(number for numbers in by_kind.values() for number in _evenly(numbers))]
    rows = _places(table, [event.get("step") for event in events], [event.get("time") for event in events])
    return {"events": [[*row, _kind(event), _event_text(event)] for row, event in zip(rows, events, strict=True)],
            "event_counts": {kind: len(numbers) for kind, numbers in by_kind.items()}}


def _places(table: RunTable, steps: Sequence[object], times: Sequence[object]) -> list[list[float | int | None]]:
    """Return [seconds since the start, step, tokens] of events at these steps and times."""
    at, when = (np.array([as_float(value) for value in values]) for values in (steps, times))
    elapsed = when - _start_time(table)
    tokens = _at_steps(table, at, table.training.column("consumed_tokens"))
    columns = (as_numbers(column, rounded=False) for column in (elapsed, at, tokens))
    return [list(row) for row in zip(*columns, strict=True)]


def _incidents_data(table: RunTable) -> list[dict[str, Any]]:
    """Return what went wrong, first what is wrong now, with the places on the curves where it begins and ends."""
    found = incidents_of(table)[:_MAX_INCIDENTS]
    begin = _places(table, [one.step for one in found], [one.time for one in found])
    end = _places(table, [one.last_step for one in found], [one.last_time for one in found])
    return [{"kind": one.kind, "text": one.headline, "advice": one.advice, "steps": one.steps_text, "open": one.is_open,
             "machine": one.machine, "detail": one.detail, "times": [one.time, one.last_time], "begin": first,
             "end": last}
            for one, first, last in zip(found, begin, end, strict=True)]


def _evenly(numbers: list[int]) -> list[int]:
    if len(numbers) <= _MAX_EVENTS:
        return numbers
    return [numbers[int(index)] for index in np.linspace(0, len(numbers) - 1, _MAX_EVENTS)]


def _event_text(event: dict[str, Any]) -> str:
    details = [f"{key} {as_text(value)}" for key, value in event.items() if key not in _EVENT_KEYS]
    text = "; ".join([*([as_text(event["reason"])] if event.get("reason") else []), *details])
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def overview(table: RunTable) -> dict[str, Any]:
    """Return the values by name. A value that is not known is None."""
    training = table.training
    record, losses, steps = table.starts[-1] if table.starts else {}, training.column("loss"), training.column("step")
    kinds = [event.get("event") for event in table.events]
    times = [value for value in (number_or_none(event.get("time")) for event in table.events) if value is not None]
    valid = table.evaluations.get("valid", Columns())
    valid_losses = valid.column("eval_loss")
    best = int(np.nanargmin(valid_losses)) if np.any(np.isfinite(valid_losses)) else None
    peak, compared = training.column("peak_memory_bytes"), newest_comparison(table)
    return {
        "step": _last(steps), "train_steps": number_or_none(record.get("train_steps")), "status": _status(table),
        "newest_time": _last(training.column("time")),
        "parameters": number_or_none(record.get("num_parameters")), "tokens": _last(training.column("consumed_tokens")),
        "loss": _last(losses), "valid_loss": _last(valid_losses),
        "expected_loss": None if compared is None else compared.expected.loss,
        "expected_text": "" if compared is None else compared.interval_text,
        "best_valid_loss": None if best is None else float(valid_losses[best]),
        "best_valid_step": None if best is None else float(valid.column("step")[best]),
        "tokens_per_second": _newest_median(training, "tokens_per_second"), "mfu": _newest_median(training, "mfu"),
        "mfu_exact": _newest_median(training, "mfu_exact"), "goodput": _last(training.column("goodput")),
        "peak_memory_bytes": float(np.nanmax(peak)) if np.any(np.isfinite(peak)) else None,
        "seconds": max(times) - min(times) if times else None, "starts": len(table.starts),
        "skips": kinds.count("skip"), "spikes": kinds.count("spike"), "rollbacks": kinds.count("rollback"),
        "not_finite": int(np.isnan(losses).sum()),
    }


def _status(table: RunTable) -> str:
    """Return why the run stopped, or "" if it has not reported an end since its last start."""
    for event in reversed(table.events):
        if event.get("event") == "stop":
            return str(event.get("reason") or "stopped")[:200]
        if event.get("event") == "start":
            break
    return ""


def _last(column: np.ndarray) -> float | None:
    """Return the last finite value."""
    finite = np.flatnonzero(np.isfinite(column))
    return float(column[finite[-1]]) if len(finite) else None


def _newest_median(training: Columns, key: str) -> float | None:
    values = training.column(key, max(training.num_rows - _NEWEST_ROWS, 0))
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None
