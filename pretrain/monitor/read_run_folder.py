"""Readers for the files of a run folder: run.json, and the rows of metrics.jsonl and events.jsonl."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError


def read_rows(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file after the first `offset` bytes; no rows if there is no file.

    Lines that are not valid JSON are skipped: a killed run may leave an incomplete last line.
    """
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            rows += [row] if isinstance(row, dict) else []
    return rows


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return read_rows(run / "metrics.jsonl")


def is_evaluated(run: Path, step: int, split: str) -> bool:
    """Return whether an evaluation of the split at this step was recorded after the newest row of training."""
    newest = itertools.takewhile(lambda row: "loss" not in row, reversed(read_metrics(run)))
    return any((row.get("step"), row.get("split")) == (step, split) for row in newest)


def newest_path(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without those of steps that were trained again later, after a resume or a rollback."""
    kept: list[dict[str, Any]] = []
    for row in reversed(rows):
        if not kept or row["step"] < kept[-1]["step"]:
            kept.append(row)
    return kept[::-1]


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Return the records of run.json, one per start, the newest last. Raises ConfigError if there are none."""
    path = run / "run.json"
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), problem=f"cannot read the record that a run writes when it starts ({reason})",
                          remedy="Name the folder that the run has in --save") from None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ConfigError(str(path), problem="this is not the record that a run writes when it starts",
                          remedy="Name the folder that the run has in --save")
    return starts


def newest_start(run: Path) -> dict[str, Any]:
    """Return the newest record of run.json. Raises ConfigError if there is none, or if it has no flags."""
    starts = read_starts(run)
    if not starts or not isinstance(starts[-1].get("flags"), dict):
        raise ConfigError(str(run / "run.json"), problem="the file is damaged: it has no record of a start")
    return starts[-1]


def recorded_layer_times(run: Path) -> dict[str, Any] | None:
    """Return the times of layers that the newest start measured or used (engine/measure/layer_times.py), if any."""
    with contextlib.suppress(ConfigError):
        return next((start["layer_times"] for start in reversed(read_starts(run)) if start.get("layer_times")), None)
    return None


def recorded_kernels(run: Path) -> dict[str, bool] | None:
    """Return which families of operators the newest start computed in C; None if no start has recorded it."""
    with contextlib.suppress(ConfigError):
        return next((start["cpu_kernels"] for start in reversed(read_starts(run)) if start.get("cpu_kernels")), None)
    return None
