"""The process that watches one rank (see `watchdog.py`).

    python -S pretrain/child.py pretrain.resilience.watcher REQUEST   (REQUEST: the JSON that `Watchdog` writes)

It ends together with its rank. It imports little more than the standard library, so that it starts in milliseconds and
needs a few MB of memory.
"""

import contextlib
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.distributed.host import STOPPED, process_state, start_time
from pretrain.resilience.hang_report import (
    RankRecord,
    arrived_ranks,
    copy_record,
    hang_folder,
    read_records,
    report_hang,
    thread_states,
    wait_until,
    write_record,
)

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_TICK_S = 1.0
_STACKS_S = 1.5  # time that the rank gets to write its stacks
_COLLECTIVES_S = 1.0  # time that the rank gets to write its last collectives
_REPORT_S = 8.0  # time for the whole report; if storage hangs, the rank is ended without it
_EXIT_S = 2.0  # time that the rank gets to exit
_KILL_STOPPED_AFTER_S = 4.0  # the launcher must see the other ranks' exit code 77 first; it looks once per second


class IdleTime:
    """Seconds without progress of a rank, during which both the rank and the watcher were able to run.

    If a machine is suspended, the clock jumps between two ticks. Such a jump counts as two ticks. While the rank is
    stopped (SIGSTOP, Ctrl-Z, a debugger), its time does not count either: the other ranks find that it is missing. If
    all ranks are stopped, nobody is missing.
    """

    def __init__(self, tick_s: float, now: float) -> None:
        self._tick_s, self.last_tick = tick_s, now
        self._progress: object = None
        self.seconds = 0.0

    def update(self, progress: object, now: float, *, stopped: bool) -> float:
        """Return the seconds since `progress` had another value. Call it once per tick."""
        passed, self.last_tick = min(now - self.last_tick, 2 * self._tick_s), now
        if progress != self._progress:
            self._progress, self.seconds = progress, 0.0
        elif not stopped:
            self.seconds += passed
        return self.seconds


@dataclass
class Watcher:
    """Watches one rank until it ends, hangs, or another rank has declared a hang."""

    pid: int
    rank: int
    world_size: int
    run: Path
    shortest_s: float
    memory: mmap.mmap  # the rank's state as JSON: see `Watchdog.enter`
    state: dict[str, Any]  # what was read there last
    stacks: int  # descriptor of the file into which faulthandler writes
    stacks_signal: int
    exit: int  # pipe: one byte makes the rank exit with 77
    collectives: int  # pipe: a path makes the rank write its last collectives there
    folder: Path  # becomes the folder of the next hang of this run
    born: int | None  # start time of the rank; a later process with the same id has another one
    ranks: list[tuple[str, int]] = field(default_factory=list)  # host and process id of each rank, once connected
    record: tuple[str, str] | None = None  # file in which the rank records its steps, and name of its copy
    received: bytes = b""  # an incomplete line from the rank

    @classmethod
    def from_request(cls, request: dict[str, Any]) -> "Watcher":
        memory, run = mmap.mmap(request.pop("memory"), 0), Path(request.pop("run"))
        return cls(memory=memory, run=run, folder=hang_folder(run), born=start_time(request["pid"]), **request)

    @property
    def tick_s(self) -> float:
        return min(_LONGEST_TICK_S, self.shortest_s / 10)

    def watch(self) -> None:
        """Wait until the rank ends, or has to be ended."""
        idle, declared = IdleTime(self.tick_s, time.monotonic()), threading.Event()
        look = threading.Event()  # set while another rank may have declared a hang
        threading.Thread(target=self._look_for_folder, args=[look, declared], daemon=True).start()
        while self._wait(self.tick_s):
            before = idle.last_tick
            stopped = process_state(self.pid) in STOPPED
            seconds = idle.update(self._progress(), time.monotonic(), stopped=stopped)
            limit_s = self.state["limit_s"]
            resumed = time.monotonic() - before > 10 * self.tick_s
            (look.set if stopped or resumed or seconds > self.shortest_s / 2 else look.clear)()
            if declared.is_set() or (limit_s and seconds > limit_s):
                reporter = threading.Thread(target=self._report, args=[seconds, stopped], daemon=True)
                reporter.start()
                reporter.join(_REPORT_S)
                self.end_rank(stopped=process_state(self.pid) in STOPPED)
                return

    def _progress(self) -> tuple[int, ...]:
        """Return values that change when the rank makes progress: its beats; in some phases also the MiB it moved."""
        with contextlib.suppress(ValueError):  # the rank is writing it; the next tick reads it
            self.state = json.loads(self.memory[:])
        moved = _moved_bytes(self.pid) >> 20 if self.state["moves_files"] else 0
        return self.state["entered"], self.state["beats"], moved

    def _wait(self, seconds: float) -> bool:
        """Wait. Returns False as soon as the rank has ended or is not watched any more."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        deadline = time.monotonic() + seconds
        while (rest := deadline - time.monotonic()) > 0 and os.getppid() == self.pid:
            if poll.poll(max(rest * 1000, 1)):
                data = os.read(0, 2**16)
                if not data:  # the rank has closed the pipe, or has ended
                    return False
                *lines, self.received = (self.received + data).split(b"\n")
                for line in lines:
                    self._receive(**json.loads(line))
        return os.getppid() == self.pid

    def _receive(self, ranks: list[tuple[str, int]] | None = None, record: tuple[str, str] | None = None) -> None:
        """Keep what the rank has sent: see `Watchdog.set_ranks` and `set_record`."""
        self.ranks = self.ranks if ranks is None else [(host, pid) for host, pid in ranks]
        self.record = record or self.record

    def _look_for_folder(self, look: threading.Event, declared: threading.Event) -> None:
        """Look for a hang that another rank has declared. A thread, because storage may hang, too."""
        while look.wait():
            with contextlib.suppress(OSError):
                if self.folder.name in os.listdir(self.folder.parent):  # unlike exists(), asks an NFS server
                    declared.set()
                    return
            time.sleep(self.tick_s)

    def _report(self, seconds: float, stopped: bool) -> None:
        """Write this rank's file, wait for the files of the other ranks, then report the hang if no other rank does."""
        values = {name: self.state[name] for name in ("phase", "step", "entered", "limit_s", "flag", "note")}
        record = RankRecord.of_process(self.pid, rank=self.rank, seconds=round(seconds, 1), **values,
                                       recorded=0 if self.record is None else copy_record(*self.record, self.folder))
        stacks = "" if stopped else self._read_stacks()
        collectives = self.folder / f"rank_{self.rank}_collectives.json"
        try:
            write_record(self.folder, record, stacks + thread_states(self.pid))
            if not stopped:
                with contextlib.suppress(BrokenPipeError):  # the rank has ended
                    os.write(self.collectives, str(collectives).encode())
            arrived = arrived_ranks(self.folder, self.rank, self.world_size)
            if not stopped:
                wait_until(collectives.exists, _COLLECTIVES_S)
            if arrived is not None:
                report_hang(self.run, self.folder, read_records(self.folder, arrived), self.world_size, self.ranks,
                            self.record[1] if self.record else "")
        except OSError as error:
            print(f"ds-pretrain: hang: rank {self.rank} on {record.host} (process {self.pid}) made no progress for "
                  f"{seconds:.0f} s in {record.position}; {self.folder} cannot be written ({error.strerror})",
                  file=sys.stderr, flush=True)

    def _read_stacks(self) -> str:
        """Return the stacks of all threads of the rank."""
        os.kill(self.pid, self.stacks_signal)
        size, deadline = 0, time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.2)
            now = os.fstat(self.stacks).st_size
            if now == size > 0:
                break
            size = now
        return os.pread(self.stacks, 2**22, 0).decode(errors="replace")

    def end_rank(self, *, stopped: bool) -> None:
        """Make the rank exit with 77. A rank that cannot run is killed after the other ranks have exited."""
        with contextlib.suppress(OSError):
            os.write(self.exit, b"x")
        has_ended = wait_until(lambda: os.getppid() != self.pid, _KILL_STOPPED_AFTER_S if stopped else _EXIT_S)
        if not has_ended and start_time(self.pid) == self.born:
            os.kill(self.pid, signal.SIGKILL)


def _moved_bytes(pid: int) -> int:
    """Return the number of bytes that a process has read and written (proc(5), /proc/PID/io); 0 if it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar", "read_b", "write_b")))
    return 0


if __name__ == "__main__":
    for number in _IGNORED:  # launchers send these to all processes; this one ends together with its rank
        signal.signal(number, signal.SIG_IGN)
    Watcher.from_request(json.loads(sys.argv[1])).watch()
    os._exit(0)  # a thread may wait for storage
