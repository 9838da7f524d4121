"""Files and messages about a hang: each rank writes one file, then one of them names the ranks that did not arrive.

Ranks meet through files in the run folder, because collectives and the store of rank 0 may be what hangs. Imports
only the standard library and distributed/host.py: see `watcher.py`.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from pretrain.distributed.host import process_state
from pretrain.errors import named

_WAIT_S = 4.0  # time for the files of other ranks
_REPORT_WAIT_S = 1.5  # time for the report of a lower rank
_POLL_S = 0.1
_ALL_LOOK, _MOST_LOOK = 64, 8  # up to 64 ranks, all list the folder of a hang; of more ranks, these
_REPORT = "report.txt"
_THREADS = 16
_RECORDED_ROWS = 64  # last rows of the file in which a rank records its steps
_LONGEST_NOTES = 2000  # characters
_STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk or device", "T": "stopped", "t": "stopped",
           "Z": "ended", "X": "ended", "": "ended"}  # state letters of proc(5)


@dataclass(frozen=True)
class RankRecord:
    """Phase and state of one rank when it or another rank made no progress."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    entered: int  # number of phases that the rank has entered; a rank with fewer is behind
    seconds: float  # without progress, while not stopped
    limit_s: float
    flag: str  # the flag that sets the limit
    state: str  # a value of _STATES
    note: str = ""  # what its data waits for
    recorded: int = 0  # last step that it has recorded; 0: none

    @classmethod
    def of_process(cls, pid: int, **values: Any) -> "RankRecord":
        """Return the record of a process on this host. `values`: the fields that this function does not set."""
        return cls(host=socket.gethostname(), pid=pid, state=_STATES.get(process_state(pid), "waiting"), **values)

    @property
    def position(self) -> str:
        return f"phase {self.phase} of step {self.step}" if self.step else f"phase {self.phase}"

    def to_text(self) -> str:
        return "".join(f"{item.name}: {getattr(self, item.name)}\n" for item in fields(self))

    @classmethod
    def from_text(cls, text: str) -> "RankRecord":
        """Read the lines before the first empty line. Raises ValueError or KeyError."""
        values = dict(line.split(": ", 1) for line in text.split("\n\n")[0].splitlines())
        return cls(**{item.name: cast(type, item.type)(values[item.name]) for item in fields(cls)})


def hang_folder(run: Path) -> Path:
    """Return the folder of the next hang: RUN/hangs/N. All ranks of a start get the same N without communication."""
    numbers = [0]
    with contextlib.suppress(OSError):
        numbers += [int(name) for name in os.listdir(run / "hangs") if name.isdecimal()]
    return run / "hangs" / str(max(numbers) + 1)


def thread_states(pid: int) -> str:
    """Return one line per thread of a process: its name, its state, and the kernel function in which it waits."""
    lines = ["", "Threads as the kernel sees them (id, state, kernel function, name):"]
    with contextlib.suppress(OSError):
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            folder = Path(f"/proc/{pid}/task/{thread}")
            with contextlib.suppress(OSError):
                state = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                where, name = (folder.joinpath(file).read_text().strip() for file in ("wchan", "comm"))
                lines.append(f"  {thread} {state} {where} {name}")
    return "\n".join(lines) + "\n"


def write_record(folder: Path, record: RankRecord, stacks: str) -> None:
    """Write FOLDER/rank_N.txt atomically. The folder is created: this declares the hang to all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{record.rank}.txt"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{record.to_text()}\n{stacks}", encoding="utf-8")
    temporary.rename(path)


def copy_record(record: str, name: str, folder: Path) -> int:
    """Copy the end of a rank's record into the hang's folder: see `Watchdog.set_record`. Return the last recorded step.

    The header is the first line of the copy. A rank that has just begun a new file has few rows there.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        folder.mkdir(parents=True, exist_ok=True)
        header, *rows = Path(record).read_text(encoding="utf-8").splitlines()
        copied = [header, *rows[-_RECORDED_ROWS:]]
        folder.joinpath(f"{Path(record).stem}_{name}.jsonl").write_text("\n".join(copied) + "\n", encoding="utf-8")
        return int(json.loads(rows[-1])["step"]) if rows else 0
    return 0


def _recorded_text(records: Mapping[int, RankRecord], name: str) -> str:
    """Return a line about the last step that each rank has recorded; "" without any."""
    ranks: dict[int, list[int]] = {}
    for rank, record in sorted(records.items()):
        ranks.setdefault(record.recorded, []).append(rank)
    if set(ranks) == {0}:
        return ""
    shown = [f"step {step}: {named('rank', those)}" for step, those in sorted(ranks.items())]
    return f"Last recorded {'; '.join(shown)}. The last rows: rank_N_{name}.jsonl.\n"


def ranks_with_file(folder: Path) -> set[int]:
    """Return the ranks that have written their file."""
    return {int(name[5:-4]) for name in os.listdir(folder) if name.endswith(".txt") and name[5:-4].isdecimal()}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition is true, at most for some seconds. Return whether it is true."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return is_true


def wait_for_ranks(folder: Path, world_size: int) -> set[int]:
    """Return the ranks that have written their file, once these are all ranks, or after some seconds."""
    wait_until(lambda: len(ranks_with_file(folder)) == world_size, _WAIT_S)
    return ranks_with_file(folder)


def arrived_ranks(folder: Path, rank: int, world_size: int) -> set[int] | None:
    """Return the ranks that have written their file; None if another rank reports the hang.

    A listing has all ranks. If each of many ranks listed the folder again and again, storage would answer none in time.
    So a few wait for the others, and the other ranks report only if these have not: all of them may be lost.
    """
    def looks(number: int) -> bool:
        return world_size <= _ALL_LOOK or number % (world_size // _MOST_LOOK) == 0

    if not looks(rank):
        time.sleep(_WAIT_S + _REPORT_WAIT_S)
        return None if os.path.exists(folder / _REPORT) else ranks_with_file(folder)
    arrived = wait_for_ranks(folder, world_size)
    first = min(filter(looks, arrived), default=rank)
    return arrived if rank == first or not wait_for_report(folder) else None


def read_records(folder: Path, ranks: Iterable[int]) -> dict[int, RankRecord]:
    """Return the records of these ranks, without those that cannot be read."""
    from concurrent.futures import ThreadPoolExecutor  # needs memory in every watcher

    def read(rank: int) -> RankRecord | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return RankRecord.from_text(folder.joinpath(f"rank_{rank}.txt").read_text(encoding="utf-8"))
        return None

    numbers = list(ranks)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="files") as pool:  # a file server needs 1 ms for a file
        found = dict(zip(numbers, pool.map(read, numbers), strict=True))
    return {rank: record for rank, record in found.items() if record is not None}


def wait_for_report(folder: Path) -> bool:
    """Return whether another rank reports the hang within a short time."""
    return wait_until(lambda: _REPORT in os.listdir(folder), _REPORT_WAIT_S)


def report_hang(run: Path, folder: Path, records: Mapping[int, RankRecord], world_size: int,
                ranks: Sequence[tuple[str, int]], record: str = "") -> None:
    """Write FOLDER/report.txt and an event, and print one line. Does nothing if another rank has done so.

    `record`: name of the copies of what the ranks have recorded.
    """
    text, suspects = describe_hang(records, world_size, ranks)
    text += "".join(f"; rank {record.rank} has waited for its data: {record.note}" for record in records.values()
                    if record.note)[:_LONGEST_NOTES]
    try:
        with open(folder / _REPORT, "x", encoding="utf-8") as file:
            file.write(text + "\n" + _recorded_text(records, record))
    except FileExistsError:
        return
    print(f"ds-pretrain: hang: {text}. Stacks of all threads: {folder}. Exit code 77.", file=sys.stderr, flush=True)
    step = max(record.step for record in records.values())
    row = {"time": time.time(), "event": "hang", "step": step, "reason": text, "ranks": suspects, "path": str(folder)}
    with open(run / "events.jsonl", "a", encoding="utf-8") as events:
        events.write(json.dumps(row) + "\n")


def describe_hang(records: Mapping[int, RankRecord], world_size: int,
                  ranks: Sequence[tuple[str, int]]) -> tuple[str, list[int]]:
    """Return a sentence about a hang, and the ranks that did not arrive where the others wait.

    Args:
        records: of all ranks that have written their file.
        world_size: number of ranks.
        ranks: host and process id of each rank; [] if the ranks have not connected.
    """
    waiting = max(records.values(), key=lambda record: (record.state != "stopped", record.seconds >= record.limit_s,
                                                        record.entered))
    found = {rank: _without_file(rank, ranks) for rank in range(world_size) if rank not in records}
    found |= {rank: f"{_name(record)} is stopped (SIGSTOP) in {record.position}"
              for rank, record in records.items() if record.state == "stopped"}
    running = [record for record in records.values() if record.state != "stopped"]
    found |= {record.rank: f"{_name(record)} is behind, in {record.position}" for record in running
              if record.entered < waiting.entered}
    others = world_size - len(found)
    text = f"no progress for {waiting.seconds:.0f} s ({waiting.flag} {waiting.limit_s:g})"
    if found:
        shown = "; ".join(found[rank] for rank in sorted(found)[:8]) + ("; ..." if len(found) > 8 else "")
        return f"{text}: {shown}; {others} rank{'s wait' if others != 1 else ' waits'} in {waiting.position}", \
            sorted(found)
    if world_size == 1:
        return f"{text}: {_name(waiting)} is in {waiting.position}", []
    hosts = sorted({record.host for record in records.values()})
    network = f"; check the network between the {len(hosts)} hosts" if len(hosts) > 1 else ""
    return f"{text}: all {world_size} ranks are in {waiting.position}: compare their stacks{network}", []


def _name(record: RankRecord) -> str:
    return f"rank {record.rank} (host {record.host}, process {record.pid})"


def _without_file(rank: int, ranks: Sequence[tuple[str, int]]) -> str:
    """Describe a rank that has written no file."""
    if rank >= len(ranks):
        return f"rank {rank} has not connected: it has not started, has ended, or its host is lost"
    host, pid = ranks[rank]
    name = f"rank {rank} (host {host}, process {pid})"
    if host != socket.gethostname():
        return f"{name} does not answer: it has ended, or its host or its network is lost"
    state = _STATES.get(process_state(pid), "waiting")
    return f"{name} has ended" if state == "ended" else f"{name} does not answer; its state is: {state}"
