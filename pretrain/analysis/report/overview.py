"""Overview of a run: the newest values and the counts that its page shows first."""

import math
from typing import Any

import numpy as np

from pretrain.analysis.report.run_table import Columns, RunTable, as_float

_NEWEST_ROWS = 50  # for the speed


def overview(table: RunTable) -> dict[str, Any]:
    """Return the values by name. A value that is not known is None."""
    training = table.training
    record, losses, steps = table.starts[-1] if table.starts else {}, training.column("loss"), training.column("step")
    kinds = [event.get("event") for event in table.events]
    times = [value for value in (_plain(event.get("time")) for event in table.events) if value is not None]
    valid = table.evaluations.get("valid", Columns())
    valid_losses = valid.column("eval_loss")
    best = int(np.nanargmin(valid_losses)) if np.any(np.isfinite(valid_losses)) else None
    peak = training.column("peak_memory_bytes")
    return {
        "step": _last(steps), "train_steps": _plain(record.get("train_steps")), "status": _status(table),
        "parameters": _plain(record.get("num_parameters")), "tokens": _last(training.column("consumed_tokens")),
        "loss": _last(losses), "valid_loss": _last(valid_losses),
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


def _plain(value: object) -> float | None:
    number = as_float(value)
    return number if math.isfinite(number) else None


def _last(column: np.ndarray) -> float | None:
    """Return the last finite value."""
    finite = np.flatnonzero(np.isfinite(column))
    return float(column[finite[-1]]) if len(finite) else None


def _newest_median(training: Columns, key: str) -> float | None:
    values = training.column(key, max(training.num_rows - _NEWEST_ROWS, 0))
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None
