"""What a run's folder says about its progress; and RUN/restarts.jsonl: a row a start, a summary with the goodput."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import newest_step
from pretrain.monitor.rows import read_rows

LEDGER = "restarts.jsonl"
_FILES = ("events.jsonl", "metrics.jsonl")


@dataclass(frozen=True)
class Start:
    """One row of the ledger: how one start of the run went."""

    time: float  # of the start, seconds since 1970
    start: int  # from 1
    exit_code: int | None  # as train.py would have given it; None: not started, a host was ill
    reason: str
    first_step: int  # steps done when it began
    last_step: int  # the last step that it logged or saved
    kept_step: int  # step of the newest whole checkpoint at its end
    productive_seconds: float  # of its steps up to kept_step: what comes after is done again
    wall_seconds: float
    hosts: list[str]  # [] where the launcher alone knows them


@dataclass(frozen=True)
class Progress:
    """What a start has added to the run folder."""

    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]  # the training rows of metrics.jsonl
    first_step: int
    kept_step: int

    @property
    def last_step(self) -> int:
        """The last step that was logged or saved."""
        return max([self.first_step, self.kept_step, *(row["step"] for row in self.steps)])

    @property
    def began(self) -> bool:
        """Whether the ranks had found each other and were about to train."""
        return any(event["event"] == "start" for event in self.events)

    @property
    def stop(self) -> dict[str, Any] | None:
        """The event with which a run ends in good order."""
        return next((event for event in reversed(self.events) if event["event"] == "stop"), None)


def marks(run: Path) -> dict[str, int]:
    """How long the run's files are, in bytes: what a start adds comes behind."""
    return {name: (run / name).stat().st_size if (run / name).is_file() else 0 for name in _FILES}


def read_progress(run: Path, since: Mapping[str, int]) -> Progress:
    """What has been written since those `marks`."""
    events, metrics = (read_rows(run / name, since[name]) for name in _FILES)
    kept = newest_step(run / "checkpoints")
    began = next((event["step"] for event in events if event["event"] == "start"), kept)
    return Progress(events, [row for row in metrics if "step_time_ms" in row], began, kept)


def step_seconds(progress: Progress) -> dict[int, float]:
    """Seconds of each step that need not be done again.

    A row of metrics.jsonl has the mean of the steps since the row before; steps that were saved before the next row
    count like those of the last one.
    """
    seconds: dict[int, float] = {}
    done, last = progress.first_step, 0.0
    for row in progress.steps:
        last = row["step_time_ms"] / 1e3
        seconds.update(dict.fromkeys(range(min(done + 1, row["step"]), row["step"] + 1), last))
        done = row["step"]
    if last:
        seconds.update(dict.fromkeys(range(done + 1, progress.kept_step + 1), last))
    return {step: value for step, value in seconds.items() if step <= progress.kept_step}


class Ledger:
    """Appends to RUN/restarts.jsonl, and knows what the starts since it was made add up to."""

    def __init__(self, run: Path) -> None:
        self._path = run / LEDGER
        self._began = time.monotonic()
        self._seconds: dict[int, float] = {}  # of each step, the last time that it was done
        self.starts: list[Start] = []

    def add(self, start: Start, seconds: Mapping[int, float]) -> None:
        """Write the row of a start that has ended; `seconds` as `step_seconds` gives them."""
        self._seconds.update(seconds)
        self.starts.append(start)
        self._append({**asdict(start), "productive_seconds": round(start.productive_seconds, 3),
                      "wall_seconds": round(start.wall_seconds, 3)})

    def close(self, outcome: str) -> dict[str, Any]:
        """Write and return the summary row: everything since the ledger was made, pauses between starts included."""
        kept = self.starts[-1].kept_step if self.starts else 0
        productive = sum(value for step, value in self._seconds.items() if step <= kept)
        wall = time.monotonic() - self._began
        row = {"time": time.time(), "summary": outcome, "starts": len(self.starts),
               "first_step": self.starts[0].first_step if self.starts else 0, "last_step": kept,
               "productive_seconds": round(productive, 3), "wall_seconds": round(wall, 3),
               "goodput": round(productive / wall, 4) if wall > 0 else 0.0}
        self._append(row)
        return row

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk is no reason to leave a run alone
            print(f"warning: {self._path}: {error.strerror}", flush=True)


def read_ledger(run: Path) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """(rows of starts, summary rows) of RUN/restarts.jsonl; none where there is no such file."""
    rows = read_rows(run / LEDGER)
    return [row for row in rows if "start" in row], [row for row in rows if "summary" in row]
