"""Read the rows of a run's files, which must be complete lines, and the output of its ranks."""

import json
from pathlib import Path
from typing import Any


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of one kind in events.jsonl."""
    return [row for row in rows(run, "events.jsonl") if row["event"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Return {step: training loss}. The last row of a repeated step counts."""
    return {row["step"]: row["loss"] for row in rows(run) if "loss" in row}


def log(run: Path) -> str:
    """Return the output of all ranks of a run that forked.py or signalled.py started."""
    return "".join(path.read_text() for path in sorted(run.parent.glob(f"{run.name}.*.log")))
