"""Run the inputs that suggestions make of wrong ones, in the process of generated.py, and put its files back."""

import multiprocessing.util
import os
import re
import resource
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tests.wrong_inputs.case import Case
from tests.wrong_inputs.remedies import ACCEPTED, applied, try_remedies
from tests.wrong_inputs.suggestions import parse_line, suggestions_of

_BEGINNING = "ds-pretrain: error: "
_MOST_CPU_SECONDS = 1.0  # an input that is still examined then has passed the checks of its flags and files
_MOST_SECONDS = 4.0  # the same for a program that waits
_MOST_BYTES = 64 << 20  # of a file: some programs begin their work in this process
_LONG_WORK = "--tasks"  # reads the 14,000 task files of lm-eval


class _AtWork(BaseException):
    """The program has begun to work: the input is accepted."""


def _begins(*_: Any, **__: Any) -> NoReturn:
    raise _AtWork


class Remedies:
    """Tries the suggestions of each line once. `every`: of all lines, otherwise of one line of each form."""

    def __init__(self, world: Path, run: Callable[[Case, Path], tuple[Any, str, str]], *, every: bool) -> None:
        self._world, self._program, self._every = world, run, every
        self._copy = world.with_name(f"{world.name}.copy")
        shutil.copytree(world, self._copy)
        self._before = _states(world)
        self._seen: set[object] = set()
        self._lines: dict[tuple[object, ...], str] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.not_understood: list[str] = []

    def try_line(self, case: Case, line: str) -> None:
        """Count the line, and try its suggestions unless another line of the same form has been tried."""
        parsed = parse_line(line)
        if (case.program, parsed.asks) in self._seen:
            return
        self._seen.add((case.program, parsed.asks))
        changed = [applied(case, parsed.target, each, self._world) for each in suggestions_of(parsed)]
        understood = any(each is not None for each in changed)
        self.counts.update(lines=1, understood=understood)
        if not understood:
            self.not_understood.append(f"{case.name}: {line}")
        elif (form := _form(case, line)) not in self._seen or self._every:
            self._seen.add(form)
            result = try_remedies(case, line, self._line_of, self._world)
            self.counts.update(tried=result.num_applied, accepted=result.num_accepted)
            self.problems += result.problems

    def _line_of(self, case: Case) -> str:
        key = (case.program, case.words, case.files)
        if key not in self._lines:
            self._lines[key] = ACCEPTED if _LONG_WORK in case.words else self._run(case)
        return self._lines[key]

    def _run(self, case: Case) -> str:
        """Return the error's line, or ACCEPTED. A program that fails in another way returns its traceback."""
        try:
            for name, content in case.files:
                path = self._world / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            with _stopped_at_work():
                code, _, err = self._program(case, self._world)
        except OSError as error:
            return f"cannot be done: {error}".replace(str(self._world), "{world}")
        finally:
            self._put_back()
        lines = [line.removeprefix(_BEGINNING) for line in err.splitlines() if line.startswith(_BEGINNING)]
        if code == 2 and lines:
            return lines[-1].replace(str(self._world), "{world}")
        is_at_work = "Traceback" not in err or _AtWork.__name__ in err or "StartedError: " in err or "[Errno 27]" in err
        return ACCEPTED if is_at_work and code != 2 else f"crash: {err[-500:]}"

    def _put_back(self) -> None:
        """Make the files of the world what they were."""
        now = _states(self._world)
        if now == self._before:
            return
        for name in sorted(now, reverse=True):
            path = self._world / name
            if name not in self._before or now[name] != self._before[name]:
                shutil.rmtree(path, ignore_errors=True) if now[name] is None else path.unlink(missing_ok=True)
        for name, state in sorted(self._before.items()):
            path = self._world / name
            if state is None:
                path.mkdir(exist_ok=True)
            elif not path.exists():
                shutil.copy2(self._copy / name, path)
        assert _states(self._world) == self._before


def _form(case: Case, line: str) -> tuple[object, ...]:
    """Return what the lines have in common that a reader would understand in the same way."""
    parsed = parse_line(line)
    text = re.sub(r"-?\d[\d.,e+-]*", "N", f"{parsed.expected}. {parsed.remedy}")
    kinds = [bool(part) for part in parsed.target]
    return ("form", *kinds, re.sub(r"--\w+|\"[^\"]*\"|'[^']*'|\{world\}\S*|\b[a-z]\w*_\w+\b", "X", text)[:100],
            case.program if not parsed.found else "")


def _states(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Return name -> (time of the last change, bytes) of each file; None for a folder."""
    states: dict[str, tuple[int, int] | None] = {}
    for parent, folders, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            states[os.path.relpath(os.path.join(parent, name), folder)] = (status.st_mtime_ns, status.st_size)
        states.update({os.path.relpath(os.path.join(parent, name), folder): None for name in folders})
    return states


@contextmanager
def _stopped_at_work() -> Iterator[None]:
    """Raise _AtWork at the first process or connection, and after some CPU time; limit the files' sizes."""
    fork, spawn, connect = os.fork, multiprocessing.util.spawnv_passfds, socket.socket.connect
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = {number: signal.signal(number, _begins) for number in (signal.SIGVTALRM, signal.SIGALRM)}
    before[signal.SIGXFSZ] = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.fork = multiprocessing.util.spawnv_passfds = socket.socket.connect = _begins  # type: ignore[method-assign,assignment]
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_BYTES, limit[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.fork, multiprocessing.util.spawnv_passfds = fork, spawn
        socket.socket.connect = connect  # type: ignore[method-assign]
