"""Readers for the files of a run folder: run.json, the rows of growing .jsonl files (Tail), and the goodput."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeGuard

from pretrain.cli import LARGEST_INT
from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import ConfigError, file_errors
from pretrain.paths import status_of
from pretrain.stored_json import build, check_fields, read_json, read_lines

_LISTS = ("train_data", "valid_data", "test_data")  # flags that take one or several values


class _Schedule(TypedDict, total=False):
    kind: str
    peak: float
    decay_steps: int


class Start(TypedDict, total=False):
    """The keys of a record in run.json whose types the readers rely on; `run_record` writes it."""

    first_step: int
    flags: dict[str, Any]
    extensions: dict[str, str]
    deepspeed_config: dict[str, Any]
    model_config: dict[str, Any]
    num_parameters: int
    train_steps: int
    layout: dict[str, Any]
    batch: dict[str, Any]
    data: dict[str, str]
    samples_per_epoch: int | None
    unigram_entropy: float | None
    schedule: Annotated[dict[str, Any], _Schedule] | None
    layer_times: dict[str, Any] | None
    versions: dict[str, Any]
    hosts: list[str]


def read_rows(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file after the first `offset` bytes; no rows if there is no file.

    Lines that are not valid JSON are skipped: a killed run may leave an incomplete last line.
    """
    if not path.is_file():
        return []
    return [row for lines, _ in read_lines(path, offset) for row in map(parse_row, lines) if row is not None]


def read_metrics(run: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl after the first `offset` bytes that have a step."""
    return [row for row in read_rows(run / "metrics.jsonl", offset) if _is_step(row.get("step"))]


def read_events(run: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the rows of events.jsonl after the first `offset` bytes that have an event and a step."""
    return [row for row in read_rows(run / "events.jsonl", offset)
            if isinstance(row.get("event"), str) and _is_step(row.get("step"))]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a row is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_INT


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_INT


def is_evaluated(run: Path, step: int, split: str) -> bool:
    """Return whether an evaluation of the split at this step was recorded after the newest row of training."""
    newest = itertools.takewhile(lambda row: "loss" not in row, reversed(read_metrics(run)))
    return any((row.get("step"), row.get("split")) == (step, split) for row in newest)


def newest_path(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the rows of steps that were trained again later, after a resume or a rollback."""
    kept: list[dict[str, Any]] = []
    for row in reversed(rows):
        if not kept or row["step"] < kept[-1]["step"]:
            kept.append(row)
    return kept[::-1]


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Return the records of run.json, one per start, the newest last. Raises ConfigError if there are none."""
    path = run / "run.json"
    with file_errors(path, "cannot read the record that a run writes when it starts ({})",
                     "Name the folder that the run has in --save", (OSError, ValueError)):
        starts = build(list[Annotated[dict[str, Any], Start]], read_json(path))
        for number, start in enumerate(starts):
            flags = {name: [value] if name in _LISTS and isinstance(value, str) else value
                     for name, value in (start.get("flags") or {}).items() if value is not None}
            check_fields(RunArguments, flags, f"[{number}].flags")
    return starts


def newest_start(run: Path) -> dict[str, Any]:
    """Return the newest record of run.json. Raises ConfigError if there is none, or if it has no flags."""
    starts = read_starts(run)
    if not starts or not isinstance(starts[-1].get("flags"), dict):
        raise ConfigError(str(run / "run.json"), problem="the file is damaged: it has no record of a start")
    return starts[-1]


def newest_start_number(run: Path) -> int:
    """Return the index of the newest record of run.json; 0 if that cannot be read, which has been reported."""
    with contextlib.suppress(ConfigError):
        return max(len(read_starts(run)) - 1, 0)
    return 0


def newest_recorded(run: Path, key: str) -> dict[str, Any] | None:
    """Return the value of a key of run.json that the newest start has recorded; None if no start has."""
    with contextlib.suppress(ConfigError):
        return next((start[key] for start in reversed(read_starts(run)) if start.get(key)), None)
    return None


class Goodput:
    """Goodput: fraction of the time since a run's first start that was spent in steps that were kept.

    Steps that a resume or a rollback trained again, starts, saves and evaluations are not goodput.
    """

    def __init__(self, first_start: float) -> None:
        self._first_start = first_start  # seconds since the epoch
        self._rows: list[tuple[int, float, float]] = []  # (last step, seconds of each step, kept seconds up to here)
        self._first_step = 0  # the step before the first row

    @classmethod
    def read(cls, run: Path, step: int) -> "Goodput":
        """Return the goodput of a run that resumes after `step`, from the rows and events of its earlier starts."""
        starts = (event.get("time") for event in read_events(run) if event["event"] == "start")
        first = next((start for start in starts if is_number(start)), time.time())
        goodput = cls(float(first))
        for row in newest_path([row for row in read_metrics(run) if is_number(row.get("step_time_ms"))]):
            goodput.add(int(row["step"]), float(row["step_time_ms"]) / 1e3)
        goodput.return_to(step)
        return goodput

    def add(self, step: int, step_seconds: float) -> None:
        """Add a row: each of the steps since the last row, up to `step`, took `step_seconds`."""
        before, _, kept = self._rows[-1] if self._rows else (self._first_step, 0.0, 0.0)
        self._rows.append((step, step_seconds, kept + (step - before) * step_seconds))

    def return_to(self, step: int) -> None:
        """Drop the steps after `step`: they will be trained again. Steps without a row count like the last one."""
        seconds = 0.0
        while self._rows and self._rows[-1][0] > step:
            _, seconds, _ = self._rows.pop()
        last = self._rows[-1] if self._rows else (self._first_step, 0.0, 0.0)
        if last[0] < step:
            self.add(step, seconds or last[1])

    @property
    def kept_seconds(self) -> float:
        """Time of the steps that were kept."""
        return self._rows[-1][2] if self._rows else 0.0

    def fraction(self, now: float) -> float | None:
        """Return the goodput at a time in seconds since the epoch; None if the clock went back to before the start."""
        passed = now - self._first_start
        return min(self.kept_seconds / passed, 1.0) if passed > 0 else None


@dataclass
class Tail:
    """Reads the complete lines of a file that grows. After a replacement or a cut it begins again."""

    path: Path
    offset: int = 0
    inode: int | None = None
    lines: int = 0  # number of lines read
    _is_open: bool = False  # the last one had no end when it was read

    def was_replaced(self) -> bool:
        """Return whether the file is another one than the one that was read, or shorter."""
        status = status_of(self.path)
        return self.offset > 0 and (
            status is None or status.st_size < self.offset or status.st_ino != self.inode)

    def rows(self) -> list[dict[str, Any]]:
        """Return all new rows; those until an error of the file system."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            for block in self.blocks():
                found += [row for _, row in block]
        return found

    def blocks(self) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Yield lists of (number of the line, row). Lines that are not JSON objects are skipped."""
        if not self.path.is_file():
            return
        self.inode = os.stat(self.path).st_ino
        for lines, offset in read_lines(self.path, self.offset):
            if self._is_open and not lines[0]:
                del lines[0]
            rows, self._is_open = _parse(lines), bool(lines) and offset == self.offset
            if self._is_open:  # the last line has no end
                if rows[0] is None:  # incomplete: the rest may follow
                    self._is_open = False
                    return
                offset += len(lines[0])
            first, self.lines, self.offset = self.lines, self.lines + len(rows), offset
            yield [(line, row) for line, row in enumerate(rows, first) if row is not None]


def _parse(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the row of each line; None for a line that is not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # one call is twice as fast as one call per line
        if len(rows) == len(lines) and set(map(type, rows)) == {dict}:
            return rows
    return [parse_row(line) for line in lines]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None for a line that is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
