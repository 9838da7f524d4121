"""The files of the flight recorder: RUN/flight/start_N/rank_R.jsonl, of each start and rank. Imports no torch.

The first line of a file is its header. Each further line is the row of one step (digest.py). When a file has as many
rows as are to be kept, it replaces `rank_R.previous.jsonl` and a new one begins, so that both files together hold at
least the last N steps. A row is one `write`: after a kill the kernel still has it.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain.monitor.read_run_folder import read_rows

FLIGHT = "flight"


@dataclass(frozen=True)
class Header:
    """What a rank is: the first line of its file."""

    rank: int
    world_size: int
    host: str
    pid: int
    first_step: int  # steps done before this start
    coordinates: dict[str, int] = field(default_factory=dict)  # {"data": 0, "pipe": 1, "tensor": 0, ...}
    layers: list[str] = field(default_factory=list)  # names of this rank's layers, in the order of the lists of a row
    interval: int = 1  # --flight_interval


@dataclass(frozen=True)
class RankRecord:
    """The recording of one rank in one start."""

    header: Header
    rows: dict[int, dict[str, Any]]  # by step; a step that was trained twice (rollback): the last time


def start_folder(run: Path, start: int) -> Path:
    """Return the folder of a start, whose number is the index of its record in run.json."""
    return run / FLIGHT / f"start_{start}"


class RecordFile:
    """Appends the rows of one rank. Raises OSError."""

    def __init__(self, folder: Path, header: Header, *, steps: int) -> None:
        self._path = folder / f"rank_{header.rank}.jsonl"
        self._header, self._steps = json.dumps(asdict(header)), steps
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._begin()

    def _begin(self) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._rows = 0
        os.write(descriptor, f"{self._header}\n".encode())
        return descriptor

    def append(self, row: dict[str, Any]) -> None:
        if self._rows >= self._steps:
            os.close(self._descriptor)
            os.replace(self._path, _previous(self._path))
            self._descriptor = self._begin()
        os.write(self._descriptor, f"{json.dumps(row)}\n".encode())
        self._rows += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def read_start(folder: Path) -> dict[int, RankRecord]:
    """Return the recordings of a start by rank; files without a valid header are left out."""
    found = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        if path.name.endswith(".previous.jsonl"):
            continue
        header, *rows = read_rows(path) or [{}]
        try:
            known = Header(**header)
        except TypeError:
            continue
        earlier = read_rows(_previous(path))[1:]
        found[known.rank] = RankRecord(known, {row["step"]: row for row in [*earlier, *rows]
                                               if isinstance(row.get("step"), int)})
    return found


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.stem}.previous.jsonl")
