"""The files of the flight recorder: RUN/flight/start_N/rank_R.jsonl, of each start and rank. Imports no torch.

The first line of a file is its header. Each further line is the row of one step (compare.py). When a file has as many
rows as are to be kept, it replaces `rank_R.previous.jsonl` and a new one begins, so that both files together hold at
least the last N steps. A row is one `write`: after a kill the kernel still has it.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pretrain.monitor.read_run_folder import read_events, read_rows

FLIGHT = "flight"
_KEPT_STARTS = 3


@dataclass(frozen=True)
class Header:
    """Description of a rank: the first line of its file. Other versions may have written other fields."""

    rank: int
    world_size: int = 0  # 0: unknown
    host: str = ""
    pid: int = 0
    first_step: int = 0  # steps done before this start
    coordinates: dict[str, int] = field(default_factory=dict)  # see RankOrder.coordinates
    layers: list[str] = field(default_factory=list)  # names of this rank's layers, in the order of the lists of a row
    interval: int = 1  # steps between two rows with all keys; 0: not chosen yet
    start: int = 0  # number of the start
    # if the interval was chosen here: milliseconds of a "step", of the keys of "each_step", of those of the "interval"
    measured_ms: dict[str, float] = field(default_factory=dict)


_FIELDS = {each.name for each in fields(Header)}


@dataclass(frozen=True)
class RankRecord:
    """The recording of one rank in one start."""

    header: Header
    rows: dict[int, dict[str, Any]]  # by step; a step that was trained twice (rollback): the last time


def kept_folder(run: Path, step: int, reason: str) -> Path:
    """Return the folder of copies that stay. `reason`: spike, request."""
    return run / FLIGHT / "kept" / f"step_{step}_{reason}"


def start_folder(run: Path, start: int) -> Path:
    """Return the folder of a start, whose number is the index of its record in run.json."""
    return run / FLIGHT / f"start_{start}"


class RecordFile:
    """Appends the rows of one rank. All methods raise OSError.

    Args:
        folder: see `start_folder`.
        steps: number of rows after which a new file begins.
    """

    def __init__(self, folder: Path, header: Header, *, steps: int) -> None:
        self.path = folder / f"rank_{header.rank}.jsonl"
        self._header, self._steps = header, steps
        folder.mkdir(parents=True, exist_ok=True)
        self._begin([])

    def _begin(self, lines: list[str]) -> None:
        """Begin a new file, with these rows. It replaces the last one at once, so that a kill loses no row."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in [json.dumps(asdict(self._header)), *lines]))
        self._descriptor = os.open(temporary, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.replace(temporary, self.path)
        self._rows = len(lines)

    def append(self, row: dict[str, Any]) -> None:
        """Append a row, or nothing if the disk is full."""
        if self._rows >= self._steps:
            os.replace(self.path, _previous(self.path))
            self.close()
            self._begin([])
        data, size = f"{json.dumps(row)}\n".encode(), os.fstat(self._descriptor).st_size
        if os.write(self._descriptor, data) < len(data):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._rows += 1

    def change_header(self, **values: Any) -> None:
        """Change fields of the header of the current file and of later ones."""
        self._header = replace(self._header, **values)
        lines = self.path.read_text().splitlines()[1:]
        self.close()
        self._begin(lines)

    def copy_to(self, folder: Path) -> None:
        """Copy the current and the previous file into a folder, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.path, _previous(self.path)):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path, folder / path.name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def prune_starts(run: Path, newest: int) -> None:
    """Remove the records of old starts. Only one rank may call this.

    The newest _KEPT_STARTS starts remain, and of the older ones the newest _KEPT_STARTS that ended in a crash or hang.
    """
    numbers = sorted((int(name[6:]) for name in _names_in(run / FLIGHT) if name.startswith("start_")
                      and name[6:].isdecimal() and int(name[6:]) <= newest), reverse=True)
    old = numbers[_KEPT_STARTS:]
    if not old:
        return
    stopped = _starts_with_a_stop(run)
    unexpected = [number for number in old if number not in stopped]
    for number in set(old) - set(unexpected[:_KEPT_STARTS]):
        shutil.rmtree(start_folder(run, number), ignore_errors=True)


def _names_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _starts_with_a_stop(run: Path) -> set[int]:
    """Return the numbers of the starts that ended as they should: with an event `stop`."""
    found, start = set[int](), -1
    for row in read_events(run):
        start += row["event"] == "start"
        if row["event"] == "stop":
            found.add(start)
    return found


def read_start(folder: Path, *, before: float = math.inf) -> dict[int, RankRecord]:
    """Return the recordings of a start by rank; files without a valid header are left out.

    `before`: leave out rows from this time on, in seconds since 1970.
    """
    found = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        if path.name.endswith(".previous.jsonl"):
            continue
        header, *rows = read_rows(path) or [{}]
        if "rank" not in header:
            continue
        known = Header(**{name: value for name, value in header.items() if name in _FIELDS})
        earlier = read_rows(_previous(path))[1:]
        found[known.rank] = RankRecord(known, {row["step"]: row for row in [*earlier, *rows]
                                               if isinstance(row.get("step"), int) and _time_of(row) < before})
    return found


def _time_of(row: dict[str, Any]) -> float:
    found = row.get("time")
    return found if isinstance(found, float) else 0.0


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.stem}.previous.jsonl")
