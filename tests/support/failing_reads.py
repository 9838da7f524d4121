"""Programs that start a run, while one read of the run folder after another fails as on a network file system.

    python -m tests.support.failing_reads FOLDER

For each program and each of its reads, a forked process runs the program with an error at this read, alternately once
and for all reads of some time. Prints one JSON object a process. The programs call `run_launcher`, and start shell
scripts. Other modules call `main` with programs of theirs.
"""

import builtins
import errno
import io
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.cluster import ds_pretrain, outcome
from pretrain.errors import ConfigError

ERRORS = (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOENT, errno.EIO)
OUTAGE_S, RETRY_S = 0.5, 0.2  # an outage is longer than the tries
AT_ONCE = 8  # processes
BEGAN, ROW = '{"event": "start", "step": 0}', '{"step": 3, "loss": 1, "step_time_ms": 5}'
STOP = '{"event": "stop", "step": 9, "reason": "%s"}'


class FailingReads:
    """Counts the reads below a folder, and lets those from number `first` on fail: one, or all for `OUTAGE_S`."""

    def __init__(self, folder: Path, first: int | None, number: int, *, outage: bool) -> None:
        self.count, self._folder, self._first, self._errno, self._outage = 0, str(folder), first, number, outage
        self._until = float("inf")

    def install(self) -> None:
        for module, name in ((os, "open"), (os, "stat"), (os, "lstat"), (os, "scandir"), (os, "listdir"), (io, "open"),
                             (builtins, "open")):
            setattr(module, name, self._failing(getattr(module, name)))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **named: Any) -> Any:
            mode = args[0] if args else named.get("mode", "r")
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder) \
                    and not (isinstance(mode, str) and {*mode} & {*"wax+"}):
                self._fail(path)
            return function(path, *args, **named)

        return call

    def _fail(self, path: Any) -> None:
        self.count += 1
        if self._first is None or self.count < self._first:
            return
        if self.count == self._first:
            self._until = time.monotonic() + OUTAGE_S
        if self.count == self._first or (self._outage and time.monotonic() < self._until):
            raise OSError(self._errno, os.strerror(self._errno), str(path))


def launched(run: Path) -> int:
    """A launcher that got a signal, and exits with 1 although its run was saved."""
    return ds_pretrain.run_launcher(["bash", "-c", f"echo '{STOP % 'SIGTERM'}' >> {run}/events.jsonl; exit 1"],
                                     dict(os.environ), run)


def saved(run: Path) -> int:
    """A launcher that exits with 75."""
    return ds_pretrain.run_launcher(["bash", "-c", "exit 75"], dict(os.environ), run)


Programs = dict[str, Callable[[Path], int]]  # name -> (run folder) -> exit code


def begin(name: str, program: Callable[[Path], int], run: Path, first: int | None, number: int, *, outage: bool
          ) -> Callable[[], dict[str, Any]]:
    """Run a program in a forked process. Returns a function that waits for its end, and returns what happened."""
    run.mkdir(parents=True)
    reader, writer = os.pipe()
    if os.fork() == 0:
        found: dict[str, Any] = {"program": name, "read": first, "errno": errno.errorcode[number], "outage": outage}
        reads = FailingReads(run, first, number, outage=outage)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            reads.install()
            found["code"] = program(run)
        except ConfigError as error:
            found["rejected"] = str(error)
        except BaseException:
            found["traceback"] = traceback.format_exc()
        reads._first = None
        found |= {"reads": reads.count, "began": (run / "starts").exists()}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)

    def end() -> dict[str, Any]:
        with open(reader, "rb") as file:
            return json.loads(file.read())

    return end


def main(folder: Path, programs: Programs) -> None:
    outcome.RETRY_S = RETRY_S
    for name, program in programs.items():
        plain = begin(name, program, folder / name / "plain", None, errno.EIO, outage=False)()
        print(json.dumps(plain), flush=True)
        errors, reads = itertools.cycle(ERRORS), range(1, plain["reads"] + 1)
        for together in (reads[start:start + AT_ONCE] for start in range(0, len(reads), AT_ONCE)):
            for end in [begin(name, program, folder / name / str(first), first, next(errors), outage=first % 2 == 0)
                        for first in together]:
                print(json.dumps(end()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"launch": launched, "save": saved})
