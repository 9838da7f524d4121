"""The commands of the documentation pages: the quickstart, then all others, with an installed wheel.

tests/support/pages.py lists the commands that are not run, with reasons. All pages share one copy of the checkout: the
example on the page of concepts trains a run, and the commands of the other pages resume, verify and export this run.
The model of the quickstart has fewer layers here, and trains for fewer steps on a smaller corpus.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest

from tests.support.extensions import entries_of_extensions, modules_of_extensions
from tests.support.installed import build_wheel, install
from tests.support.launch import ROOT
from tests.support.pages import GUIDE, PAGES, QUICKSTART, README, block_commands, blocks, runnable, smaller
from tests.support.warm_starts import hand_over_at_start, warm

SCRIPTS = Path(sys.executable).parent
PRINTED: set[str] = set()  # lines that the commands printed, normalized
NOT_PRINTED = ("ds-pretrain: error: zero2.json", "ds-pretrain [train]",
               *entries_of_extensions("page_commands", "NOT_PRINTED"))
WARM: dict[str, str] = {}  # variables of programs that run in forks of a warm process
FRESH = bool(os.environ.get("DS_PRETRAIN_FRESH"))  # make a new environment, in an empty home directory


def _environment(clone: Path, home: Path) -> dict[str, str]:
    """Return the variables of a user who has run launch/setup.sh, as `tests/run.sh` does before these tests.

    With FRESH, return the variables of a user who has just logged in. launch/quickstart.sh then creates the virtual
    environment, which takes minutes.
    """
    kept = {key: value for key, value in os.environ.items()
            if key in ("LANG", "TERM", "SHELL", "USER", "LOGNAME", "TMPDIR")
            or key.startswith(("PIP_", "PYENV", "SSL_")) or key.lower().endswith("_proxy")}
    if not FRESH:
        path = os.pathsep.join([f"{clone}/.venv/bin", str(SCRIPTS), os.environ["PATH"]])
        return {**os.environ, **WARM, "VENV": str(clone / ".venv"), "SETUP": "done", "PATH": path}
    scripts = {str(SCRIPTS), os.path.join(os.environ.get("VIRTUAL_ENV", "-"), "bin")}
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part not in scripts]
    return {**kept, "HOME": str(home), "PATH": os.pathsep.join(path)}


def _run(command: str, clone: Path, home: Path, *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    begin = time.monotonic()
    done = subprocess.run(["bash", "-c", command], cwd=cwd or clone, env=_environment(clone, home), capture_output=True,
                          text=True, timeout=3600)
    print(f"{time.monotonic() - begin:.1f} s: {command}")
    PRINTED.update(_normalized(line.replace(f"{clone}/", "")) for line in (done.stdout + done.stderr).splitlines())
    return done


def _normalized(line: str) -> str:
    """Return a line of output without numbers, colours and alignment, which differ from run to run."""
    return " ".join(re.sub(r"\d[\d.,:]*(e[-+]\d+)?", "#", re.sub(r"\x1b\[\d*m", "", line)).split())


def _is_printed(line: str) -> bool:
    """Return whether a command printed this line of a page. In the line, `...` matches any text."""
    pattern = ".*".join(re.escape(part.strip()) for part in _normalized(line).split("..."))
    return any(re.fullmatch(pattern, printed) for printed in PRINTED)


def _not_cloned(folder: str, names: list[str]) -> set[str]:
    """Return .git and the names that .gitignore excludes. Works without git, because an archive has no .git folder."""
    patterns = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]
    here = [pattern.removeprefix("/") for pattern in patterns if Path(folder) == ROOT or not pattern.startswith("/")]
    return {name for name in names if any(fnmatch(name, pattern) for pattern in here)}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Return (copy of the working tree, empty home directory). Its programs run in forks of a warm process."""
    base = tmp_path_factory.mktemp("fresh")
    clone, home = base / "ds-pretrain", base / "home"
    home.mkdir()
    shutil.copytree(ROOT, clone, symlinks=True, ignore=_not_cloned)
    if not FRESH:
        for file, full, short in (("launch/quickstart.yaml", "train_steps: 120", "train_steps: 60"),
                                  ("launch/quickstart.yaml", "n_layer=6", "n_layer=2"),
                                  ("pretrain/commands/corpus.py", "default=30", "default=8")):
            text = (clone / file).read_text()
            assert text.count(full) == 1
            (clone / file).write_text(text.replace(full, short))
        (clone / ".venv").symlink_to(install(build_wheel(clone, base / "dist"), base / "env"))
        hand_over_at_start(*clone.glob(".venv/lib/python*/site-packages"))
        environ = {**_environment(clone, home), "OMP_NUM_THREADS": "1"}
        with warm(base, clone / ".venv", environ) as variables:
            WARM.update(variables)
            yield clone, home
    else:
        yield clone, home


@pytest.fixture(scope="module")
def quickstart(fresh: tuple[Path, Path]) -> tuple[Path, Path, str]:
    """Run the quickstart: launch/quickstart.sh in a new checkout, or else the installed command in an empty folder.

    Returns (copy of the working tree, empty home directory, output). The copy's runs/ is that of the quickstart.
    """
    clone, home = fresh
    empty = clone.parent / "empty"
    empty.mkdir()
    done = _run(QUICKSTART, clone, home) if FRESH else _run("ds-pretrain quickstart", clone, home, cwd=empty)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    if not FRESH:
        assert [path.name for path in empty.iterdir()] == ["runs"]
        (clone / "runs").symlink_to(empty / "runs")
    print(done.stdout[-3000:])
    return clone, home, done.stdout


def _number(label: str, text: str) -> float:
    match = re.search(rf"{label}\s+([\d.]+)", text)
    assert match, text[-3000:]
    return float(match.group(1))


def test_quickstart_trains_below_the_unigram_entropy(quickstart: tuple[Path, Path, str]) -> None:
    clone, _, printed = quickstart
    assert _number("validation loss", printed) < _number("unigram entropy", printed) - 0.5
    assert re.search(r"a sample.*?def read_.{20}", printed, re.DOTALL)
    assert (clone / "runs/quickstart/checkpoints/latest").is_file()
    files = {path.name for path in (clone / "runs/quickstart").glob("checkpoints/global_step*/*")}
    assert {"layer_00-model_states.pt", "manifest.json"} <= files
    assert "Next:" in printed


def test_the_quickstart_yaml_configures_the_run(quickstart: tuple[Path, Path, str]) -> None:
    """The comments of the YAML name a command. launch/quickstart.sh resumes the run."""
    clone, home, _ = quickstart
    text = (clone / "runs/quickstart/quickstart.yaml").read_text()
    command, = (line[4:].removesuffix(" --train_steps 500") for line in text.splitlines() if line[:4] == "#   ")
    assert command.startswith("ds-pretrain ")
    done = _run(QUICKSTART, clone, home)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "is complete" in done.stdout


@pytest.fixture(scope="module")
def guide(quickstart: tuple[Path, Path, str]) -> tuple[Path, Path]:
    """Run the commands of the README and of the guide, and return (copy of the working tree, home directory)."""
    clone, home, _ = quickstart
    (clone / "text").mkdir()  # the user's own text
    documents = (clone / "runs/quickstart/corpus/train.jsonl").read_text().splitlines(keepends=True)
    (clone / "text/own.jsonl").write_text("".join(documents[:150]))
    for page in (README, GUIDE):
        _run_page(page, clone, home)
    return clone, home


def test_losses_do_not_depend_on_the_layout(guide: tuple[Path, Path]) -> None:
    """The guide's two runs have equal losses. One has two pipeline stages, the other two ZeRO-2 ranks."""
    runs = [[json.loads(line) for line in (guide[0] / "runs" / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("quickstart", "first")]
    pipeline, zero2 = ({row["step"]: row["loss"] for row in rows if row.get("step") in (1, 10) and "loss" in row}
                       for rows in runs)
    assert set(pipeline) == {1, 10}
    assert zero2 == pytest.approx(pipeline, rel=5e-4)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (README, GUIDE) and runnable(page)],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_page_succeed(page: Path, guide: tuple[Path, Path]) -> None:
    _run_page(page, *guide)


@pytest.mark.parametrize("page", [page for page in PAGES if any(language == "text" for language, _ in blocks(page))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_output_on_the_page_is_printed(page: Path, guide: tuple[Path, Path]) -> None:
    """The commands of a page print the output that the page shows, except for the numbers."""
    lines = [line for language, content in blocks(page) if language == "text" for line in content.splitlines()]
    lines = [line for line in lines if not line.startswith(NOT_PRINTED)]
    if not all(map(_is_printed, lines)) and page not in (README, GUIDE):  # this test was selected alone
        _run_page(page, *guide)
    assert [line for line in lines if not _is_printed(line)] == []


def test_the_guides_run_has_resumed_and_used_the_mirror(guide: tuple[Path, Path]) -> None:
    """The commands of the pages resumed the guide's run, and saved it in the background and to a mirror."""
    clone, home = guide
    if not (clone / "runs/mirror").exists():  # this test was selected alone
        _run_page(ROOT / "pretrain/pages/checkpoints.md", clone, home)
    rows = [json.loads(line) for line in (clone / "runs/first/events.jsonl").read_text().splitlines()]
    assert {"resume", "snapshot", "save", "mirror"} <= {row["event"] for row in rows}


@pytest.mark.parametrize("module", [module for module in modules_of_extensions("page_commands")
                                    if hasattr(module, "check_guide")], ids=lambda module: module.__name__)
def test_extensions_on_the_guides_runs(module: ModuleType, guide: tuple[Path, Path], tmp_path: Path) -> None:
    module.check_guide(guide[0], lambda command: _run(command, *guide), tmp_path)


def _run_page(page: Path, clone: Path, home: Path) -> None:
    for language, content in blocks(page):  # files of the user
        if language in ("python", "yaml") and (name := re.match(r"# (\w+\.(?:py|yaml))\b", content)):
            (clone / name[1]).write_text(content)
    for command in block_commands(page):
        if command not in runnable(page) and not (FRESH and command.startswith("pip install ")):
            continue
        if page != README and command in runnable(README):  # first_run.md explains them
            continue
        command = smaller(command)
        if command.endswith(" --watch"):
            _serve(command, clone, home)
            continue
        if "--offload" in command or "nvme" in command:
            done = _run_in_this_environment(command, clone)
        else:
            done = _run(f"source .venv/bin/activate; export OMP_NUM_THREADS=1; {command}", clone, home)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def _serve(command: str, clone: Path, home: Path) -> None:
    """Run a command that serves a page until Ctrl-C: get the page from the printed address, then interrupt it."""
    with subprocess.Popen(["bash", "-c", f"source .venv/bin/activate; exec {command}"], cwd=clone, text=True,
                          env=_environment(clone, home), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with urlopen(process.stdout.readline().split()[0]) as page:
            assert b"<html" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def _run_in_this_environment(command: str, clone: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with the compiled offload operators of this environment. Compiling them again takes minutes."""
    environ = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "VENV": str(SCRIPTS.parent),
               "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", command], cwd=clone, env=environ, capture_output=True, text=True, timeout=3600)


def test_quickstart_names_the_next_commands(quickstart: tuple[Path, Path, str]) -> None:
    clone, home, printed = quickstart
    following = [line.strip() for line in printed[printed.index("Next:"):].splitlines()[1:6]]
    assert len(following) == 5
    done = _run(f"source .venv/bin/activate; {following[1]}", clone, home)
    assert done.returncode == 0, f"{following[1]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert following[2].startswith("ds-pretrain ")  # trains for minutes; the guide runs it with fewer steps
    run = clone / "runs" / "quickstart" if FRESH else "runs/quickstart"  # the pages run the other programs
    assert following[:1] + following[3:] == [
        f"ds-pretrain generate {run} --prompt 'class Parser:'", f"ds-pretrain evaluate {run}",
        f"ds-pretrain export {run} --output {run}-hf"]
