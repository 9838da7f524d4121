"""Imports of a run from this package: limits that only ever go down."""

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

from pretrain.active_extensions import BUILT_IN_EXTENSIONS, extensions
from tests.support.cases import config, flags
from tests.support.launch import ROOT

# reached from train.py by imports, relative ones and those inside functions too; lines without comments and docstrings
MOST_MODULES, MOST_LINES = 231, 26_300
MOST_IMPORTED = 318  # on rank 0, after two steps without extensions
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
            tokenize.ENDMARKER)


def file_of(name: str) -> Path | None:
    """Return the file of a module; None if there is none."""
    path = ROOT / Path(*name.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def imports_of(name: str, text: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[:-node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {each for each in found if each.startswith("pretrain") and file_of(each)}


def lines_of(text: str) -> int:
    """Return the number of lines with code."""
    lines = {row for token in tokenize.tokenize(io.BytesIO(text.encode()).readline) if token.type not in _NO_CODE
             for row in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and \
                ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_train_py_reaches_fewer_and_fewer_modules() -> None:
    reached: dict[str, str] = {}
    left = ["pretrain.train"]
    while left:
        name = left.pop()
        if name not in reached and (file := file_of(name)) is not None:
            reached[name] = file.read_text(encoding="utf-8")
            left += imports_of(name, reached[name])
    assert [name for name in reached if name.startswith(BUILT_IN_EXTENSIONS)] == []
    assert len(reached) <= MOST_MODULES
    assert sum(map(lines_of, reached.values())) <= MOST_LINES


def test_a_run_without_flags_of_extensions_imports_their_declarations_only(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    words = [f"--{key}={value}" for key, value in {
        **flags(corpus, layers=1, hidden=32, steps=2), "deepspeed_config": "ds.json", "save": "run",
        "flight_steps": 0}.items()]
    code = ("import sys; from pretrain.train import main; code = main(sys.argv[1:]); "
            "print('MODULES', *(name for name in sys.modules if name.startswith('pretrain')))")
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    modules = done.stdout.split("MODULES")[1].split()
    assert len(modules) <= MOST_IMPORTED
    in_each_run = {each.name for each in extensions() if not each.flags}
    parts = [name.split(".")[2:] for name in modules if name.startswith(f"{BUILT_IN_EXTENSIONS}.")
             and name.split(".")[2] not in in_each_run]
    # the module of a callback that waits for requests is imported, too
    assert {tuple(part[1:]) for part in parts} <= {(), ("extension",), ("receivers",), ("profiler",)}
