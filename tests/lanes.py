"""Choose the tests that a change needs: python -m tests.lanes [--all]

Prints the arguments of pytest, and on stderr the lane and why it was chosen. A change is all that differs from the
merge base with origin/main, in commits or in files that are not committed.

- A change of extensions and pages only: what must always hold, the tests of these extensions, and those of pages.
- Any other change: all tests of the core, and those of each extension that has changed, or that imports a module of the
  core that has changed.
- The seam, dependencies or the tests' own support have changed, the base is unknown, or nothing differs from it, as on
  main: all tests.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.support.launch import ROOT
from tests.support.source_size import imports_of, is_extension, modules

BASE = "origin/main"
# parity, layouts, resumes, kills, defects of DeepSpeed, schema, wrong inputs, deletability, sizes, texts
ALWAYS = (
    "tests/distributed/test_parity.py", "tests/distributed/test_pipelines.py",
    "tests/distributed/test_model_parallel.py", "tests/distributed/checkpoint", "tests/distributed/resilience",
    "tests/distributed/test_upstream.py", "tests/distributed/test_upstream_ranks.py", "tests/upstream",
    "tests/config/test_schema.py", "tests/wrong_inputs", "tests/extensions/test_deletable.py",
    "tests/extensions/test_own_extension.py", "tests/test_size.py", "tests/test_walks.py", "tests/test_callback.py",
    "tests/test_cli.py", "tests/test_names.py", "tests/test_project.py")
PAGES = ("tests/test_pages.py", "tests/test_site.py", "tests/test_quickstart.py", "tests/test_claims.py")
# a change of these may change what any test finds
FOR_ALL = ("pretrain/callback.py", "pretrain/extension.py", "pretrain/active_extensions.py", "pyproject.toml",
           "tests/conftest.py", "tests/run.sh", "tests/lanes.py", "tests/support/", "tests/distributed/workers/",
           "launch/setup.sh", ".ci/")


def changed_files() -> list[str] | None:
    """Return the files that differ from the merge base; None if the base is unknown."""
    base = _git("merge-base", BASE, "HEAD")
    if base is None:
        return None
    differing, untracked = _git("diff", "--name-only", base.strip()), _git("ls-files", "-o", "--exclude-standard")
    return None if differing is None or untracked is None else sorted({*differing.split(), *untracked.split()})


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def lane_of(changed: Iterable[str] | None) -> tuple[str, list[str]]:
    """Return the lane in words, and the arguments of pytest; no arguments: all tests."""
    if changed is None:
        return f"all tests: the merge base with {BASE} is unknown", []
    files = list(changed)
    if not files:
        return f"all tests: nothing differs from {BASE}", []
    if decisive := next((file for file in files if file.startswith(FOR_ALL)), None):
        return f"all tests: {decisive} has changed", []
    own = {name for file in files if (name := extension_of(file))}
    pages = [file for file in files if file.endswith(".md")]
    if all(extension_of(file) or file in pages for file in files):
        tests = [*ALWAYS, *PAGES, *(f"tests/extensions/{name}" for name in sorted(own))]
        lane = f"what must always hold, pages, and the tests of {', '.join(sorted(own)) or 'no extension'}"
        return lane, [test for test in tests if (ROOT / test).exists()]
    users = {name for name in _extensions() if name in own or _core_modules(name) & set(files)}
    left_out = sorted(set(_extensions()) - users)
    return "all tests but those of extensions that the change does not reach: " + (", ".join(left_out) or "none"), [
        f"--ignore=tests/extensions/{name}" for name in left_out]


def extension_of(file: str) -> str:
    """Return the extension to which a file or its test belongs, or ""."""
    parts = PurePosixPath(file).parts
    return parts[2] if len(parts) > 3 and parts[:2] in (("pretrain", "extensions"), ("tests", "extensions")) else ""


def _extensions() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("pretrain/extensions/*/extension.py"))


def _core_modules(name: str) -> set[str]:
    """Return the files of the core that the modules of an extension import."""
    own = [module for module in modules() if module.startswith(f"pretrain.extensions.{name}.")]
    found = {each for module in own for each in imports_of(module) if not is_extension(each)}
    return {f"{module.replace('.', '/')}{end}" for module in found for end in (".py", "/__init__.py")}


if __name__ == "__main__":
    lane, arguments = lane_of(changed_files()) if sys.argv[1:] != ["--all"] else ("all tests: --all", [])
    print(f"lane: {lane}", file=sys.stderr)
    print(" ".join(arguments))
