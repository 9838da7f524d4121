"""What a maintainer has to carry: limits that only ever go down. A new extension has a budget of its own instead.

`python -m tests.test_size` prints the numbers.
"""

import json
import subprocess
import sys
from pathlib import Path

from pretrain.active_extensions import BUILT_IN_EXTENSIONS, extensions
from tests.support.cases import config, flags
from tests.support.launch import ROOT
from tests.support.source_size import (
    handlers_of_os_errors,
    imported_once,
    is_extension,
    lines_of,
    modules,
    reached_from,
    short_modules,
    text_of,
)

MOST = {
    "modules of the core": 397, "lines of the core": 42_600, "text of the core, kB": 2_810,
    "modules reached from train.py": 220, "lines reached from train.py": 26_200,
    "modules with one importer": 127, "modules below 60 lines": 101, "handlers of OSError in the core": 189,
    "lines of the longest module": 400, "lines of tests": 53_000,
}
MOST_IMPORTED = 318  # on rank 0, after two steps without extensions


def numbers() -> dict[str, int]:
    """Return the numbers that MOST limits."""
    core = {name: text for name, text in modules().items() if not is_extension(name)}
    reached = reached_from("pretrain.train")
    tests = sum(lines_of(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py"))
    return {
        "modules of the core": len(core), "lines of the core": sum(map(lines_of, core.values())),
        "text of the core, kB": sum(map(text_of, core.values())) // 1000,
        "modules reached from train.py": len(reached),
        "lines reached from train.py": sum(lines_of(modules()[name]) for name in reached),
        "modules with one importer": len(imported_once()), "modules below 60 lines": len(short_modules()),
        "handlers of OSError in the core": sum(map(handlers_of_os_errors, core.values())),
        "lines of the longest module": max(map(lines_of, modules().values())), "lines of tests": tests}


def test_the_numbers_go_down() -> None:
    assert {name: number for name, number in numbers().items() if number > MOST[name]} == {}


def test_train_py_reaches_no_extension() -> None:
    assert [name for name in reached_from("pretrain.train") if is_extension(name)] == []


def test_a_run_without_flags_of_extensions_imports_their_declarations_only(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    words = [f"--{key}={value}" for key, value in {
        **flags(corpus, layers=1, hidden=32, steps=2), "deepspeed_config": "ds.json", "save": "run",
        "flight_steps": 0}.items()]
    code = ("import sys; from pretrain.train import main; code = main(sys.argv[1:]); "
            "print('MODULES', *(name for name in sys.modules if name.startswith('pretrain')))")
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    imported = done.stdout.split("MODULES")[1].split()
    assert len(imported) <= MOST_IMPORTED
    in_each_run = {each.name for each in extensions() if not each.flags}
    parts = [name.split(".")[2:] for name in imported if name.startswith(f"{BUILT_IN_EXTENSIONS}.")
             and name.split(".")[2] not in in_each_run]
    # the module of a callback that waits for requests is imported, too
    assert {tuple(part[1:]) for part in parts} <= {(), ("extension",), ("receivers",), ("profiler",)}


if __name__ == "__main__":
    print("\n".join(f"{name}: {number:,} (at most {MOST[name]:,})" for name, number in numbers().items()))
