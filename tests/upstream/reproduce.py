"""Run the reproducers of DeepSpeed's defects, and compare what they find with pretrain/engine/patches/apply.py.

    python -m tests.upstream.reproduce            # all defects, with this environment's DeepSpeed
    python -m tests.upstream.reproduce A B --python /envs/a/bin/python /envs/b/bin/python
    python -m tests.upstream.reproduce --table    # print the table of pretrain/engine/patches/README.md

The scripts in reproducers/ also run alone, with DeepSpeed and torch only. Here they run as forks of one process, which
has imported DeepSpeed and shares the compiled operators of this package.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.cli import Parser, run_main
from pretrain.engine.patches.apply import DEFECTS, MEASURED, find_defect
from pretrain.errors import ConfigError, shorten
from tests.upstream.run_forks import CANNOT_RUN, CORRECT, DEFECTIVE

FOLDER = Path(__file__).parent / "reproducers"
_ANSWERS = {CORRECT: "no", DEFECTIVE: "yes", CANNOT_RUN: "cannot run"}


@dataclass(frozen=True)
class Result:
    """What the reproducer of a defect found."""

    letter: str
    deepspeed: str  # version
    code: int  # exit code; negative: killed by this signal, SIGALRM after LIMIT_S
    line: str  # what is expected and what was found

    @property
    def answer(self) -> str:
        """Whether the defect exists, in a word or two."""
        return _ANSWERS.get(self.code, "timed out" if self.code == -signal.SIGALRM else "failed")

    @property
    def is_in_table(self) -> bool:
        """Whether the table of the defects says the same. A script that cannot run contradicts nothing."""
        if self.code == CANNOT_RUN:
            return True
        return self.code == (DEFECTIVE if find_defect(self.letter).exists_in(self.deepspeed) else CORRECT)


def reproducer(letter: str) -> Path:
    """Return the script of a defect."""
    (script,) = FOLDER.glob(f"{letter.lower()}_*.py")
    return script


def run_reproducers(letters: Iterable[str] = (), *, python: str = sys.executable) -> list[Result]:
    """Run the scripts of some defects, or of all, with an interpreter whose environment has DeepSpeed and this package.

    As many run at a time as there are CPU cores.
    """
    chosen = [find_defect(letter).letter for letter in letters] or [defect.letter for defect in DEFECTS]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(Path(__file__).with_name("run_forks.py")), folder,
                   *(str(reproducer(letter)) for letter in chosen)]
        log = Path(folder, "log")
        with log.open("w") as output:
            subprocess.run(command, env=environ, stdout=output, stderr=subprocess.STDOUT, check=False)
        answer = Path(folder, "answer.json")
        if not answer.exists():
            raise ConfigError(python, problem=f"the reproducers cannot run: {shorten(_last_line(log), 300)}",
                              remedy="name an interpreter whose environment has DeepSpeed and this package")
        found = json.loads(answer.read_text())
        return [Result(letter, found["deepspeed"], code, _last_line(Path(folder, reproducer(letter).stem)))
                for letter, code in zip(chosen, found["codes"], strict=True)]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def print_results(results: Sequence[Result]) -> list[str]:
    """Print a line for each result. Return the letters of those that differ from the table of the defects."""
    for result in results:
        note = "" if result.is_in_table else f" [the table says {'no' if result.code == DEFECTIVE else 'yes'}]"
        print(f"{result.letter:<3} {result.answer + note:<10}  {result.line}")
    return [result.letter for result in results if not result.is_in_table]


def markdown_table() -> str:
    """Return the table of the page: the defects of each version of MEASURED, and what this package does."""
    rows = [["", "defect", *MEASURED, "DeepSpeed's files", "in this package"]]
    rows.append(["---", "---", *("---" for _ in MEASURED), "---", "---"])
    for defect in DEFECTS:
        script = reproducer(defect.letter)
        rows.append([f"[{defect.letter}](../../../tests/upstream/reproducers/{script.name})", defect.title,
                     *("yes" if defect.exists_in(version) else "no" for version in MEASURED),
                     ", ".join(f"`{name.removeprefix('../')}`" for name in defect.files), defect.treatment])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main() -> int:
    """Run the reproducers, and return 0 if all results are as in the table, otherwise 1."""
    parser = Parser(description="Run the reproducers of DeepSpeed's defects.")
    parser.add_argument("letters", nargs="*", metavar="LETTER", help="defects (default: all)")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="FILE",
                        help="interpreters of the environments to test (default: this one)")
    parser.add_argument("--table", action="store_true", help="print the table of the page instead")
    args = parser.parse_args()
    if args.table:
        print(markdown_table(), end="")
        return 0
    others = []
    for python in args.python:
        found = run_reproducers(args.letters, python=python)
        print(f"DeepSpeed {found[0].deepspeed}")
        others += print_results(found)
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(run_main(main))
