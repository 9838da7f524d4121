"""RunTable: the rows of metrics.jsonl as columns, events and predictions of a run. It reads only what was appended."""

import contextlib
import json
import math
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import read_starts

_BLOCK_BYTES = 8 * 2**20
_MAX_KEYS = 100  # columns; the rows of a damaged or foreign file may have any number of keys
_MAX_SPLITS = 50
_LARGEST_STEP = 2.0**53  # larger whole numbers are not exact as float64, in Python and in a browser


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


@dataclass
class _Tail:
    """Reads the complete lines of a file that grows. After a replacement or a cut it begins again."""

    path: Path
    offset: int = 0
    inode: int | None = None
    lines: int = 0  # number of lines read

    def was_replaced(self) -> bool:
        """Return whether the file is another one than the one that was read, or shorter."""
        try:
            status = os.stat(self.path)
        except OSError:
            return self.offset > 0
        return self.offset > 0 and (status.st_size < self.offset or status.st_ino != self.inode)

    def blocks(self) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Yield lists of (number of the line, row). Lines that are not JSON objects are skipped."""
        if not self.path.is_file():
            return
        with open(self.path, "rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset)
            while block := file.readlines(_BLOCK_BYTES):
                rows = _parse(block)
                if rows[-1] is None and not block[-1].endswith(b"\n"):  # incomplete: the rest may follow
                    rows.pop()
                    block.pop()
                first, self.lines = self.lines, self.lines + len(rows)
                self.offset += sum(map(len, block))
                yield [(line, row) for line, row in enumerate(rows, first) if row is not None]


def _parse(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the row of each line; None for a line that is not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # one call is twice as fast as one call per line
        if len(rows) == len(lines) and set(map(type, rows)) == {dict}:
            return rows
    return [_parse_line(line) for line in lines]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


@dataclass
class RunTable:
    """Contents of a run folder: training rows, evaluation rows by split, events, predictions, the records of run.json.

    Raises ConfigError if the folder has neither a run.json nor a metrics.jsonl, or if a file cannot be read.
    """

    run: Path
    generation: int = 0  # grows when a file was replaced, so that earlier rows are no longer valid
    training: Columns = field(default_factory=Columns)
    evaluations: dict[str, Columns] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""  # why `starts` is empty

    def __post_init__(self) -> None:
        if not any((self.run / name).is_file() for name in ("run.json", "metrics.jsonl")):
            raise ConfigError(str(self.run), problem="this is not a run folder: it has no run.json and no "
                              "metrics.jsonl", remedy="Name the folder that the run has in --save")
        self._metrics, self._events, self._predictions = (
            _Tail(self.run / f"{name}.jsonl") for name in ("metrics", "events", "predictions"))
        self._record: tuple[int, int] | None = None  # time and size of run.json when it was read
        self.update()
        self.generation = 0

    @property
    def num_lines(self) -> int:
        """Number of lines of metrics.jsonl that were read."""
        return self._metrics.lines

    def update(self) -> None:
        """Read what was appended since the last call."""
        try:
            if any(file.was_replaced() for file in (self._metrics, self._events, self._predictions)):
                self._begin_again()
            for block in self._metrics.blocks():
                self._add(block)
            for block in self._events.blocks():
                self.events += [row for _, row in block]
            for block in self._predictions.blocks():
                self.predictions += [row for _, row in block]
        except OSError as error:
            raise ConfigError(str(error.filename or self.run),
                              problem=f"the file cannot be read ({error.strerror})") from None
        self._read_starts()

    def _begin_again(self) -> None:
        self._metrics, self._events, self._predictions = (
            _Tail(file.path) for file in (self._metrics, self._events, self._predictions))
        self.training, self.evaluations, self.events, self.predictions = Columns(), {}, [], []
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
        try:
            status = path.stat()
        except OSError:
            status = None
        record = (status.st_mtime_ns, status.st_size) if status else None
        if record == self._record and (record is not None or self.problem):
            return
        try:
            self.starts, self.problem = read_starts(self.run), ""
        except ConfigError as error:
            self.starts, self.problem = [], str(error)
        self._record, self.generation = record, self.generation + 1
