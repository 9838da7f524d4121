"""Read what a run has written about itself: run.json, and the rows of events.jsonl, metrics.jsonl and the like."""

import json
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError


def read_rows(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The rows of a .jsonl behind `offset` bytes, without lines that a kill cut short; none where there is no file."""
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
    """The rows of metrics.jsonl."""
    return read_rows(run / "metrics.jsonl")


def read_starts(run: Path) -> list[dict[str, Any]]:
    """The records of run.json, the newest last. Raises ConfigError for what is no run folder."""
    path = run / "run.json"
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), found=str(getattr(error, "strerror", None) or error),
                          expected="the record that a run writes when it starts",
                          remedy="name the folder that --save gave") from None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ConfigError(str(path), problem="it is not the record that a run writes when it starts",
                          remedy="name the folder that --save gave")
    return starts


def newest_start(run: Path) -> dict[str, Any]:
    """The newest record of run.json, with its flags. Raises ConfigError where it has none."""
    starts = read_starts(run)
    if not starts or not isinstance(starts[-1].get("flags"), dict):
        raise ConfigError(str(run / "run.json"), problem="it records no start of a run", remedy="the file is damaged")
    return starts[-1]
