"""Starts of a run that ended without a report: from the supervisor's log, and from events that are missing."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pretrain.analysis.run_table import RunTable, as_float
from pretrain.errors import FINISHED, GUARD, HANG, REJECTED, STOPPED

_KINDS = {None: "not_started", REJECTED: "rejected", GUARD: "guard", HANG: "hang"}


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
