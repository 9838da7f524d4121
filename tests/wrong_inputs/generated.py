"""Wrong inputs generated from the parsers and schemas of the programs: wrong values for each flag and each key.

`python -m tests.wrong_inputs.generated FOLDER OUT [NAME] [every]` runs all cases in one process, in which importing
torch or deepspeed fails. It writes one JSON line per case: the name of the case, and the problem with its error message
("" if there is none). Then it tries what the messages suggest, and writes OUT.remedies.json: numbers of lines, the
circles, and lines whose suggestions it does not understand. `every`: of all messages, not of one of each form.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.config import layout_rules
from tests.wrong_inputs.case import LEGAL, Case, main_of
from tests.wrong_inputs.commands import command_cases
from tests.wrong_inputs.files import content_cases, json_cases, model_cases
from tests.wrong_inputs.flags import flag_cases
from tests.wrong_inputs.inputs import input_cases
from tests.wrong_inputs.remedy_runs import Remedies
from tests.wrong_inputs.world import make_world

_MAX_CPU_SECONDS = 20  # for one case
_STATUS = ("reading the task files of lm-eval",
           "loading the task own and its data: without a network, this takes up to a minute")


def all_cases() -> list[Case]:
    """Return every generated case, including LEGAL."""
    return [*flag_cases(), *input_cases(), *command_cases(), *content_cases(), *json_cases(), *model_cases()]


def cases() -> list[Case]:
    """Return the cases that must be rejected."""
    legal = {name for names in LEGAL.values() for name in names}
    return [case for case in all_cases() if case.name not in legal]


class StartedError(AssertionError):
    """The program began its work, for which the input must be accepted."""


class _NoTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that makes imports of torch and deepspeed fail. importlib.util.find_spec still finds them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name in ("torch", "deepspeed") else None

    def create_module(self, spec: Any) -> Any:
        raise StartedError(f"{spec.name} was imported before the input was rejected")

    def exec_module(self, module: Any) -> None: ...


def _no_process(self: Any, words: Any, *_: Any, **__: Any) -> None:
    if words[0] != "nvidia-smi":
        raise StartedError(f"{words} was started before the input was rejected")
    raise FileNotFoundError


def _took_too_long(*_: Any) -> None:
    raise AssertionError(f"{_MAX_CPU_SECONDS} s of CPU time without a rejection")


def run_case(case: Case, world: Path, files: set[str]) -> tuple[str, str]:
    """Run one case. Return the problem with its rejection, or "" if there is none, and the line of the error.

    `files`: the files and folders of the world, to which those are added that the case leaves behind.
    """
    written = [world / name for name, _ in case.files]
    kept = {path: path.read_bytes() for path in written if path.exists()}
    made = {path.parent for path in written if not path.parent.exists()}
    for (_, content), path in zip(case.files, written, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    try:
        code, out, err = _run(case, world)
        changed = sorted((files | set(map(str, [*written, *made]))) ^ _listing(world))
    finally:
        for path in written:
            path.unlink(missing_ok=True)
        for path, content in kept.items():
            path.write_bytes(content)
        for folder in made:
            folder.rmdir()
    files.symmetric_difference_update(changed)
    lines = [line for line in err.splitlines() if line not in _STATUS]
    missing = [part for part in case.culprit.replace("{world}", str(world)).split(" ... ") if part not in err]
    for wrong, problem in ((changed, f"left behind or removed: {changed[:3]}"), (code != 2, f"exit code {code}"),
                           (out != "", "output"), ("Traceback" in err, "traceback"), (len(lines) != 1, "lines"),
                           (len(err) > 2000, "a line of over 2000 characters"),
                           (not "".join(lines).startswith("ds-pretrain: error: "), "start"),
                           (missing != [], f"no {missing} in it")):
        if wrong:
            return f"{problem}: {err[-1500:]} {out[:300]}", ""
    return "", lines[0].removeprefix("ds-pretrain: error: ").replace(str(world), "{world}")


def _listing(folder: Path) -> set[str]:
    return {os.path.join(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)}


def _run(case: Case, world: Path) -> tuple[Any, str, str]:
    from pretrain.cli import run_main

    words = [*case.program.split(" ")[1:], *(word.replace("{world}", str(world)) for word in case.words)]
    environment = dict(os.environ)
    sys.argv = [case.program, *words]
    out, err, code = io.StringIO(), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main = main_of(case.program)
            signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)
            run_main(main)
    except SystemExit as end:
        code = end.code
    except BaseException:
        err.write(traceback.format_exc())
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.environ.clear()
    os.environ.update(environment)
    return code, out.getvalue(), err.getvalue()


def _read_tasks_of_lm_eval_once() -> None:
    """Share lm-eval's index of its 14,000 task files between the cases: it takes seconds to read."""
    try:
        from lm_eval.tasks import _index
    except ImportError:
        return
    default, build = Path(_index.__file__).parent, _index.TaskIndex.build
    shared = functools.cache(lambda: build([default]))

    def build_rest(paths: Iterable[Path]) -> dict[str, Any]:
        paths = list(paths)
        return {**(shared() if default in paths else {}), **build([path for path in paths if path != default])}

    _index.TaskIndex.build = staticmethod(build_rest)


def main(folder: str, out: str, only: str = "", every: str = "") -> None:
    """Run the cases whose name contains `only`."""
    sys.meta_path.insert(0, _NoTorch())
    subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign,assignment]
    signal.signal(signal.SIGPROF, _took_too_long)
    layout_rules.find_library = lambda name: name  # it would start processes
    world = Path(folder)
    make_world(world)
    (world / "tmp").mkdir()
    (world / "cwd").mkdir()
    tempfile.tempdir = str(world / "tmp")
    os.chdir(world / "cwd")
    os.environ.update(DS_ACCELERATOR="cpu", TMPDIR=str(world / "tmp"))
    _read_tasks_of_lm_eval_once()
    files, remedies = _listing(world), Remedies(world, _run, every=every == "every")
    with open(out, "w", encoding="utf-8") as file:
        for case in cases():
            if only in case.name:
                problem, line = run_case(case, world, files)
                file.write(json.dumps([case.name, problem]) + "\n")
                file.flush()
                if not problem:
                    remedies.try_line(case, line)
    Path(f"{out}.remedies.json").write_text(json.dumps({
        "counts": remedies.counts, "problems": remedies.problems, "not_understood": remedies.not_understood}))


if __name__ == "__main__":
    main(*sys.argv[1:])
