"""Size of the package for somebody who maintains it: lines of code, text, imports, and handlers of OSError."""

import ast
import functools
from pathlib import Path

from pretrain.active_extensions import BUILT_IN_EXTENSIONS
from tests.support.launch import ROOT

SHORT = 60  # lines of code
# what a handler of files and connections names
_OS_ERRORS = {name for name, value in vars(__import__("builtins")).items()
              if isinstance(value, type) and issubclass(value, OSError)}


@functools.cache
def modules() -> dict[str, str]:
    """Return the source of each module of the package."""
    found = {}
    for path in sorted((ROOT / "pretrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def is_extension(name: str) -> bool:
    """Return whether a module belongs to an extension."""
    return name.startswith(f"{BUILT_IN_EXTENSIONS}.")


def lines_of(text: str) -> int:
    """Return the number of lines with code: without blank lines, comments and docstrings."""
    rows = text.splitlines()
    lines = {number for number, row in enumerate(rows, 1) if row.strip() and not row.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and \
                ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def text_of(text: str) -> int:
    """Return the bytes of all lines without indentation."""
    return sum(len(line.strip().encode()) for line in text.splitlines())


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    """Return the modules of the package that a module imports, also relative ones and those inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[:-node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(found & modules().keys()) - {name}


def reached_from(name: str) -> set[str]:
    """Return a module, and all that it imports directly or through others."""
    reached: set[str] = set()
    left = {name}
    while left:
        reached |= left
        left = {each for module in left for each in imports_of(module)} - reached
    return reached


def imported_once() -> list[str]:
    """Return the modules that one other module imports, and no more; declarations of extensions aside."""
    importers: dict[str, int] = {}
    for name in modules():
        for each in imports_of(name):
            importers[each] = importers.get(each, 0) + 1
    return [name for name, count in importers.items()
            if count == 1 and not _is_package(name) and not _is_declaration(name)]


def short_modules() -> list[str]:
    """Return the modules of less than SHORT lines of code, except packages and declarations of extensions."""
    return [name for name, text in modules().items() if lines_of(text) < SHORT and not _is_package(name)
            and not _is_declaration(name)]


def _is_declaration(name: str) -> bool:
    return is_extension(name) and name.endswith(".extension")


def _is_package(name: str) -> bool:
    return Path(ROOT, *name.split(".")).is_dir()


def handlers_of_os_errors(text: str) -> int:
    """Return the number of handlers (`except`) of OSError and its subclasses."""
    caught = [node.type for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler) and node.type]
    return sum(any(isinstance(each, ast.Name) and each.id in _OS_ERRORS for each in ast.walk(node)) for node in caught)
