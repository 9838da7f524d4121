"""Checks of the documentation pages: words, table cells, existing paths and links, and commands that tests run."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.commands import COMMANDS
from tests.support.launch import ROOT
from tests.support.pages import (
    NOT_RUN,
    PAGES,
    README,
    block_commands,
    blocks,
    inline_commands,
    is_checked_by_name,
    looks_like_command,
    named_subcommand,
    prose,
    runnable,
)

_FOLDERS = ("pretrain", "ds_configs", "launch", "tools", "tests")
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _anchor(heading: str) -> str:
    """Return the anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _named_paths(page: Path) -> list[str]:
    """Return the paths in code spans that begin with a top-level folder."""
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    words = [word.partition("::")[0].strip("[]") for span in spans for word in span.split()]
    return [word for word in words if word.split("/")[0] in _FOLDERS and "/" in word]


def test_every_page_is_listed() -> None:
    found = {page for pattern in ("*.md", ".github/*.md", "tools/**/*.md", "pretrain/**/*.md",
                                  *(f"{folder}/*.md" for folder in _FOLDERS)) for page in ROOT.glob(pattern)}
    data = set(ROOT.glob("pretrain/extensions/*/*/**/*.md"))  # of an extension, such as recipes with their sources
    assert found - data == set(PAGES)


@EACH_PAGE
def test_pages_are_short(page: Path) -> None:
    """README.md also has a limit of lines, because it is what a newcomer reads first."""
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 2500
    assert page != README or len(text.splitlines()) <= 120


@EACH_PAGE
def test_table_cells_are_short(page: Path) -> None:
    """A table that a command writes is left out: its cells quote error messages."""
    text = re.sub(r"<!-- table -->.*<!-- end of the table -->", "", prose(page), flags=re.DOTALL)
    cells = [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell) > (200 if page == README else 300)] == []


def test_core_pages_and_all_pages_have_budgets() -> None:
    """Numbers of pages and words, which only go down."""
    core = [page for page in PAGES if page == README or page.parent == ROOT / "pretrain/pages"]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert len(core) <= 22
    assert sum(words[page] for page in core) <= 30_000
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in core) <= 2800
    of_recipes = ROOT.glob("pretrain/extensions/*/*/**/*.md")
    assert sum(words.values()) + sum(len(page.read_text(encoding="utf-8").split()) for page in of_recipes) <= 50_000


@EACH_PAGE
def test_named_paths_exist(page: Path) -> None:
    assert [path for path in _named_paths(page) if not (ROOT / path).exists()] == []


@EACH_PAGE
def test_link_targets_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        assert not target.startswith("http"), "pages link files of this repository only"
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(_anchor, headings), target


def test_the_layer_table_matches_the_import_contract() -> None:
    """Each layer of the import contract has a row in pretrain/README.md, in the same order."""
    contract = (ROOT / "pyproject.toml").read_text().split("exhaustive = true")[1]
    layers = re.findall(r'^    "(.*)",$', contract.split("]")[0], re.MULTILINE)
    table = (ROOT / "pretrain/README.md").read_text().split("## The layers")[1].split("##")[0]
    rows = [re.findall(r"`pretrain/(\w+)(?:/|\.py)`", line.split("|")[1]) for line in table.splitlines()
            if line.startswith("| `")]
    assert rows == [layer.split(" | ") for layer in layers]


@EACH_PAGE
def test_commands_are_in_bash_blocks(page: Path) -> None:
    """Blocks of text have the output of the page's commands, blocks of log other output, blocks of json settings.

    Blocks of python are files of the user, which begin with the name: test_quickstart.py writes them for the commands.
    """
    for language, content in blocks(page):
        assert language in ("bash", "text", "log", "json", "python", "toml", "yaml"), \
            f"a block of {language or 'no language'}"
        assert language != "python" or re.match(r"# \w+\.py\b", content)
        if language == "json":
            json.loads(content)
        if language != "bash":
            assert [line for line in content.splitlines() if looks_like_command(line)] == []


@EACH_PAGE
def test_inline_commands_are_run(page: Path) -> None:
    known = {*NOT_RUN, *(command for each in PAGES for command in runnable(each))}
    assert [command for command in inline_commands(page)
            if command not in known and not is_checked_by_name(command)] == []


@EACH_PAGE
def test_pytest_and_pip_commands_name_existing_paths_and_extras(page: Path) -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for command in [*block_commands(page), *inline_commands(page)]:
        if command.startswith("pytest "):
            words = [word for word in command.split()[1:] if "/" in word]
            assert words
            assert all((ROOT / word).exists() for word in words), command
        if command.startswith("pip install "):
            match = re.fullmatch(r"pip install 'ds-pretrain\[(\w+)\]'", command)
            assert match, command
            assert match[1] in extras


@EACH_PAGE
def test_named_subcommands_exist(page: Path) -> None:
    names = {named_subcommand(command) for command in inline_commands(page)} - {""}
    assert names - COMMANDS.keys() == set()


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--(\w+)", text))


@functools.cache
def _known_flags(program: str) -> set[str]:
    """Return the flags that a program's --help lists, or that a shell script contains."""
    if program.endswith(".sh"):
        return _flags(re.sub(r"[|(\[)]", " ", (ROOT / program).read_text(encoding="utf-8")))
    start = [sys.executable, *(["-m", *program.split()] if "/" not in program else [program])]
    done = subprocess.run([*start, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return _flags(re.sub(r"[,|(\[]", " ", done.stdout))


@pytest.mark.parametrize("command", sorted(NOT_RUN))
def test_commands_that_are_not_run_are_on_a_page_and_name_existing_files_and_flags(command: str) -> None:
    named = [each for page in PAGES for each in (*block_commands(page), *inline_commands(page))]
    assert command in named, "no page has this command any more"
    files = [word for word in command.split() if word.split("/")[0] in _FOLDERS and "/" in word]
    assert [word for word in files if not (ROOT / word).exists()] == []
    programs = re.findall(r"launch/\w+\.sh|tests\.chaos|tests\.extensions\.\w+\.\w+", command)
    programs += [f"pretrain {word}" for word in command.split() if word in COMMANDS]
    programs += [f"pretrain {words}" for words in re.findall(r"ds-pretrain ((?:data|inspect|checkpoint) \w+)", command)]
    programs += ["pretrain prepare"] * ("prepare.sbatch" in command) + re.findall(r"tools/\w+\.py", command)
    known = set().union(*map(_known_flags, {*programs, "pretrain train"} if _flags(command) else ()))
    of_others = {"deepspeed": {"module"}, "dry-gpu": {"setup", "random"},
                 "sbatch": {"parsable", "array", "dependency", "kill"}}
    known = known.union(*(flags for name, flags in of_others.items() if f"{name} " in command))
    assert _flags(command) - known == set()
