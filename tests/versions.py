"""Test this package with other versions of Python, torch, DeepSpeed, transformers and numpy, one cell each.

    tests/versions.sh [--runs FOLDER] [--environments FOLDER] [CELL...]

Without arguments, all cells that CELLS lists. A cell gets an environment of its own; saves, resumes, generates text,
converts and consolidates checkpoints on 2 ranks; reads the checkpoint of the first cell, which reads its checkpoint in
turn; and runs TESTS and SLOW_TESTS. Prints one row per cell, for pretrain/pages/measurements/versions.csv. The exit
code is 1 if a cell fails.

A cell with the Python of this environment adds its packages to those of this environment. For another Python,
launch/setup.sh creates an environment (about 6 GB if pip finds no CPU build of torch).
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tests.support.version_steps import ROOT, Environment, StepError, read_other, save

PINNED, LOWEST = "launch/constraints.txt", "launch/constraints-lowest.txt"
TESTS = ("tests/distributed/test_parity.py", "tests/distributed/checkpoint/test_resume.py",
         "tests/distributed/checkpoint/test_golden_checkpoint.py", "tests/distributed/test_upstream.py",
         "tests/distributed/test_upstream_ranks.py", "tests/distributed/test_skipped_updates.py",
         "tests/distributed/test_pipelines.py", "tests/model", "tests/checkpoint/test_export_hf.py",
         "tests/checkpoint/test_import.py")
SLOW_TESTS = ("tests/upstream/test_reproducers.py",)
FOR_TESTS = ("pytest", "hypothesis", "pyarrow", "accelerate")
OWN_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SHOWN = ("torch", "deepspeed", "transformers", "numpy")


@dataclass(frozen=True)
class Cell:
    """Versions to test. What is not given is as in this environment."""

    name: str
    packages: tuple[str, ...] = ()  # requirements of pip
    python: str = OWN_PYTHON
    constraints: str = PINNED


CELLS = (
    Cell("pinned"),
    Cell("lowest", python="3.10", constraints=LOWEST),
    Cell("highest", python="3.13", constraints=os.devnull),
    Cell("python-3.10", python="3.10"),
    Cell("python-3.12", python="3.12"),
    Cell("deepspeed-0.18.9", ("deepspeed==0.18.9",)),
    Cell("deepspeed-0.19.0", ("deepspeed==0.19.0",)),
)


class NotHereError(Exception):
    """This machine cannot make the environment of a cell."""


def interpreter(version: str) -> str:
    """Return a Python of this minor version: on PATH, or the newest of pyenv. Raises NotHereError."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in (sys.executable, shutil.which(f"python{version}"), "/usr/bin/python3",
                 *map(str, sorted(pyenv.glob(f"{version}.*/bin/python3"), reverse=True))):
        code = "import sys; print(*sys.version_info[:2], sep='.')"
        if path and os.path.exists(path) and _output([path, "-c", code]) == version:
            return path
    raise NotHereError(f"this machine has no Python {version}")


def make_environment(cell: Cell, folder: Path) -> str:
    """Return the path of the cell's Python, after making its environment in `folder`. Raises NotHereError."""
    if cell == Cell(cell.name):
        return sys.executable
    log = folder.with_suffix(".log")
    python = str(folder / "bin/python")
    if cell.python == OWN_PYTHON and cell.constraints == PINNED:
        if not os.path.exists(python):
            _run(log, sys.executable, "-m", "venv", "--without-pip", folder)
        shared = folder / f"lib/python{OWN_PYTHON}/site-packages/shared.pth"
        shared.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        _run(log, sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation", *cell.packages)
    else:
        _run(log, "launch/setup.sh", PYTHON=interpreter(cell.python), VENV=str(folder), CONSTRAINTS=cell.constraints)
        _run(log, python, "-m", "pip", "install", "-c", cell.constraints, *FOR_TESTS)
    return python


def _run(log: Path, *words: object, **variables: str) -> None:
    with open(log, "ab") as file:
        done = subprocess.run([*map(str, words)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                              env={**os.environ, "DS_BUILD_OPS": "0", **variables})
    if done.returncode:
        raise NotHereError(f"its environment cannot be made here (see {log})")


def _output(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.strip()


@dataclass
class Result:
    """What a cell gave."""

    versions: list[str]  # of Python and SHOWN
    passed: list[str]
    problem: str = ""
    missing: str = ""  # why this machine has no such cell

    def row(self, name: str) -> str:
        result = f"not run: {self.missing}" if self.missing else \
            f"FAILED: {self.problem}" if self.problem else "; ".join(self.passed)
        return f'{",".join([name, date.today().isoformat(), *self.versions])},"{result}"'


def versions_of(python: str) -> list[str]:
    code = f"import platform; from importlib.metadata import version; print(platform.python_version(), " \
           f"*map(version, {SHOWN}))"
    return _output([python, "-c", code]).split()


def run_tests(environment: Environment, name: str, paths: tuple[str, ...], *words: str) -> str:
    """Run tests, and return pytest's last line."""
    last = environment.do(name, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c",
                          ROOT / "pyproject.toml", *words, *(ROOT / path for path in paths), PYTHONWARNINGS="")
    return last.rpartition(" in ")[0].strip("= ")


def steps_of(environment: Environment, first: Environment | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the steps of a cell by their names in the row."""
    yield "save, resume, generate, convert, consolidate", lambda: save(environment)
    if first is not None:
        yield f"reads {first.name}", lambda: read_other(environment, first)
        yield f"{first.name} reads it", lambda: read_other(first, environment)
    if environment.executable != sys.executable:  # tests/run.sh tests this environment
        yield "tests", lambda: run_tests(environment, "tests", TESTS)
        yield "slow tests", lambda: run_tests(environment, "slow-tests", SLOW_TESTS, "-m", "slow")


def run_cell(environment: Environment, first: Environment | None, result: Result) -> None:
    """Take the steps of a cell until one fails."""
    for name, action in steps_of(environment, first):
        print(f"[versions] {environment.name}: {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            done = action()
        except (StepError, OSError) as error:
            result.problem = f"{name}: {error}"
            return
        result.passed.append(str(done) if done else name)
        print(f"[versions] {environment.name}: {name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    known = {cell.name: cell for cell in CELLS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="new folder for runs and logs; default: a temporary one")
    parser.add_argument("--environments", type=Path, help="folder of environments, which are reused and kept; default: "
                                                          "inside the folder of runs")
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"default: all of {', '.join(known)}")
    args = parser.parse_args()
    if unknown := sorted(set(args.cells) - set(known)):
        parser.error(f"there is no cell {unknown[0]}; the cells are {', '.join(known)}")
    runs = (args.runs or Path(tempfile.mkdtemp(prefix="versions-"))).absolute()
    environments = (args.environments or runs / "environments").absolute()
    environments.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    first: Environment | None = None
    for name in args.cells or known:
        print(f"[versions] {name}: environment", file=sys.stderr, flush=True)
        try:
            python = make_environment(known[name], environments / name)
        except NotHereError as error:
            results[name] = Result(["-"] * (1 + len(SHOWN)), [], missing=str(error))
            continue
        results[name] = Result(versions_of(python), [])
        environment = Environment(name, python, runs / name)
        environment.folder.mkdir(parents=True)
        run_cell(environment, first, results[name])
        if first is None and not results[name].problem:
            first = environment
    print(",".join(["cell", "date", "Python", *SHOWN, "result"]))
    for name, result in results.items():
        print(result.row(name))
    failed = any(result.problem for result in results.values())
    if failed:
        print(f"logs: {runs}", file=sys.stderr)
    elif args.runs is None:
        shutil.rmtree(runs)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
