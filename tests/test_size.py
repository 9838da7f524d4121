"""Size of what a maintainer has to carry: limits that only go down. A new extension has a budget of its own instead.

`python -m tests.test_size` prints the numbers.
"""


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
    "modules of the core": 325, "lines of the core": 35_720, "text of the core, kB": 2_380,
    "modules reached from train.py": 193, "lines reached from train.py": 23_650,
    "modules with one importer": 112, "modules below 60 lines": 57, "handlers of OSError in the core": 99,
    "lines of the longest module": 376, "lines of tests": 54_400,
}


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


if __name__ == "__main__":
    print("\n".join(f"{name}: {number:,} (at most {MOST[name]:,})" for name, number in numbers().items()))
