"""The watchdog of a rank: it ends the process with exit code 77 if the main thread makes no progress.

Each rank starts a small process of its own, the watcher (`watcher.py`). The main thread writes its phase and step into
memory that both processes share; the watcher reads this memory. A process was chosen because no thread of the rank can
do all of this:

- A Python thread does not run while the main thread holds the interpreter's lock inside C++.
- The C thread of `faulthandler.dump_traceback_later` runs without the lock, but can only end with exit code 1, and
  needs a new thread for each phase.
- No thread runs while the rank is stopped (SIGSTOP). The watcher still runs, and can report that the rank is stopped.

The watcher asks the rank for two things, and both work while the main thread holds the interpreter's lock:

- The stacks of all threads: a signal, which `faulthandler` handles in C.
- The exit code 77: see `exit_when_readable`.

A third request needs the lock, and is left out if no thread can get it: the list of the last collectives, which torch
keeps in memory ("flight recorder").
"""

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pretrain.child import child_command
from pretrain.config.flags.arguments import RunArguments
from pretrain.distributed.process import ROOT
from pretrain.distributed.world import World
from pretrain.errors import HANG
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.run_lock import RunLock

PHASES = ("connect", "checkpoint", "build", "load", "trial", "data", "step", "rollback", "eval", "save", "end")
_FILE_PHASES = ("checkpoint", "load", "rollback", "save", "end")  # bytes that the rank reads or writes are progress
_SHARED_BYTES = 8192
_LONGEST_NOTE = 960  # characters; JSON takes at most 6 bytes for each
_STACKS_SIGNAL = signal.SIGRTMAX - 2  # real-time signals are free for programs; SIGUSR1 and SIGTERM ask for a save
_LAST_COLLECTIVES = 100  # torch keeps 2000, which take 1 MB
_SIGEV_THREAD = 2  # <bits/sigevent-consts.h>


@dataclass(frozen=True)
class TimeOuts:
    """Seconds without progress after which a rank counts as hung, by phase; 0: no limit."""

    first: dict[str, tuple[float, str]]  # phase -> (seconds, flag), when a phase is entered for the first time
    later: dict[str, tuple[float, str]]  # the same for each later time

    @classmethod
    def from_flags(cls, args: RunArguments) -> "TimeOuts":
        """Return the limits that the flags set. The first step and the first evaluation may compile."""
        step, first = (args.step_timeout, "--step_timeout"), (args.first_step_timeout, "--first_step_timeout")
        file = (args.save_timeout, "--save_timeout")
        later = dict.fromkeys(PHASES, step)
        if step[0]:
            later |= dict.fromkeys(("load", "save", "rollback", "end"), file if file[0] >= step[0] else step)
        start = dict.fromkeys(("connect", "checkpoint", "build", "trial", "data", "step", "eval"), first)
        later |= {"trial": first, "build": first}  # a trial may build several engines, and make first steps
        start["load"] = file if first[0] and file[0] > first[0] else first
        return cls(first={**later, **start}, later=later)

    @property
    def longest_s(self) -> float:
        """The largest limit, or 0 if there is none."""
        return max(seconds for seconds, _ in [*self.first.values(), *self.later.values()])

    @property
    def shortest_s(self) -> float:
        """The smallest limit, or 0 if there is none."""
        return min((seconds for seconds, _ in [*self.first.values(), *self.later.values()] if seconds), default=0.0)


class Watchdog:
    """Records what the main thread does, for the watcher of this rank.

    Args:
        run: the run folder, which all hosts share.
        time_outs: without any limit, no watcher is started.
    """

    def __init__(self, run: Path, world: World, time_outs: TimeOuts) -> None:
        self.time_outs = time_outs
        self._first = dict(time_outs.first)  # a phase that has been entered has its limit of `time_outs.later`
        self._state: dict[str, Any] = {"entered": 0, "beats": 0, "note": ""}
        self._memory: mmap.mmap | None = None  # the state as JSON, shared with the watcher
        self._watcher: subprocess.Popen[str] | None = None
        if time_outs.longest_s:
            try:
                self._start(run, world)
            except OSError as error:  # such as no more processes allowed
                print(f"warning: rank {world.rank} runs without its watchdog: {error}", file=sys.stderr, flush=True)

    def _start(self, run: Path, world: World) -> None:
        shared, stacks = os.memfd_create("watchdog"), os.memfd_create("stacks")
        os.ftruncate(shared, _SHARED_BYTES)
        self._memory = mmap.mmap(shared, _SHARED_BYTES)
        ask, asked = os.pipe(), os.pipe()
        self._stacks = stacks  # faulthandler writes to this descriptor: keep it open
        self.enter("connect", 0)
        request = {"pid": os.getpid(), "rank": world.rank, "world_size": world.size, "run": str(run.absolute()),
                   "shortest_s": self.time_outs.shortest_s, "state": self._state, "memory": shared, "stacks": stacks,
                   "stacks_signal": int(_STACKS_SIGNAL), "exit": asked[1], "collectives": ask[1]}
        self._watcher = subprocess.Popen(
            child_command("pretrain.resilience.watcher", json.dumps(request), options=("-S",)), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            pass_fds=(shared, stacks, ask[1], asked[1]))
        os.close(shared)
        faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        self._exit_request = exit_when_readable(asked[0], HANG)
        threading.Thread(target=_write_collectives, args=[ask[0]], name="watchdog", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """Record that the main thread begins a phase of a step, or the next batch in it. `phase`: one of PHASES.

        All ranks enter the same phases in the same order: the number of entries shows which rank is behind.
        """
        seconds, flag = self._first[phase]
        self._first[phase] = self.time_outs.later[phase]
        self._record(entered=self._state["entered"] + 1, step=step, phase=phase, limit_s=float(seconds), flag=flag,
                     moves_files=phase in _FILE_PHASES)

    def beat(self) -> None:
        """Record that all ranks make progress in the current phase, for example while files are verified."""
        self._record(beats=self._state["beats"] + 1)

    def note(self, line: str) -> None:
        """Record what the data of this rank waits for, for the report of a hang; "": for nothing."""
        self._record(note=line[:_LONGEST_NOTE])

    def _record(self, **values: Any) -> None:
        self._state.update(values)
        if self._memory is not None:
            self._memory[:] = json.dumps(self._state).encode().ljust(_SHARED_BYTES)

    def set_ranks(self, ranks: Sequence[tuple[str, int]]) -> None:
        """Give the watcher the host and process id of each rank, for a rank whose host is lost later."""
        self._send({"ranks": ranks})

    def set_record(self, path: Path, name: str) -> None:
        """Give the watcher the file in which this rank records its steps. After a hang, it copies the end.

        The file has a header and then a JSON object with "step" in each line. The copy is rank_N_NAME.jsonl.
        """
        self._send({"record": [str(path.absolute()), name]})

    def _send(self, values: dict[str, Any]) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(OSError):  # the watcher has ended
                self._watcher.stdin.write(json.dumps(values) + "\n")
                self._watcher.stdin.flush()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # its report thread waits for storage
                self._watcher.wait(2.0)
            faulthandler.unregister(_STACKS_SIGNAL)


@dataclass(frozen=True)
class RankGuards:
    """The guards of one rank's process, as opposed to the guards of its steps (`Guard`, `ReplicaCheck`)."""

    lock: RunLock
    launcher: LauncherWatch
    watchdog: Watchdog


@contextlib.contextmanager
def rank_guards(run: Path, world: World, time_outs: TimeOuts, launcher: LauncherWatch) -> Iterator[RankGuards]:
    """Start the guards of a rank before it imports torch: hold the lock of the run folder, and run the watchdog.

    Raises ConfigError if another start holds the lock."""
    with RunLock(run, active=world.rank == 0) as lock, Watchdog(run, world, time_outs) as watchdog:
        yield RankGuards(lock, launcher, watchdog)


class _ReadRequest(ctypes.Structure):
    """`struct aiocb` of <aio.h>, up to the members of its aio_sigevent that are needed here."""

    _fields_ = (("fildes", ctypes.c_int), ("lio_opcode", ctypes.c_int), ("reqprio", ctypes.c_int),
                ("buf", ctypes.c_void_p), ("nbytes", ctypes.c_size_t), ("value", ctypes.c_size_t),
                ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("function", ctypes.c_void_p),
                ("rest", ctypes.c_char * 1024))  # the library's own; 168 bytes in all in glibc


def exit_when_readable(descriptor: int, code: int) -> object:
    """Make this process exit with `code` once a byte can be read from a pipe, even if Python's lock is never released.

    The C library reads the pipe in a thread (aio_read), which then calls the function of the notification SIGEV_THREAD
    (sigevent(7)): `_exit`, with `code` as its argument. No Python code runs. Without aio_read (a C library other than
    glibc and musl, a 32-bit system), the watcher kills the process after 2 s, and the exit code is -9.

    Returns the memory of the request. Keep a reference to it.
    """
    library, byte = ctypes.CDLL(None), ctypes.create_string_buffer(1)
    if ctypes.sizeof(ctypes.c_void_p) != 8 or not hasattr(library, "aio_read"):
        return None
    request = _ReadRequest(fildes=descriptor, buf=ctypes.addressof(byte), nbytes=1, value=code, notify=_SIGEV_THREAD,
                           function=ctypes.cast(library._exit, ctypes.c_void_p).value)
    library.aio_read(ctypes.byref(request))
    return request, byte


def _write_collectives(requests: int) -> None:
    """Write torch's list of the last collectives to the file whose path comes through the pipe."""
    path = os.read(requests, 4096).decode()
    if not path:
        return
    with contextlib.suppress(Exception):  # private functions of torch; their names differ between versions and devices
        from torch._C import _distributed_c10d as c10d

        dumps = [getattr(c10d, name)() for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
                 if hasattr(c10d, name)]
        for record in map(json.loads, dumps):
            if entries := record.get("entries"):  # torch for CUDA has both; the first has no collectives of gloo
                temporary = Path(f"{path}.tmp")
                temporary.write_text(json.dumps({**record, "entries": entries[-_LAST_COLLECTIVES:]}, indent=1))
                temporary.rename(path)
                return
