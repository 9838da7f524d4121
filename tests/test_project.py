"""The files of a release: version, changelog, citation, workflows, and the cheap steps of .github/release.sh."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import pretrain
from tests.support.launch import ROOT

FOLDER = ROOT / ".github"


def _git(*words: str, cwd: Path) -> str:
    return subprocess.run(["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *words], cwd=cwd,
                          check=True, capture_output=True, text=True).stdout


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((FOLDER / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", (FOLDER / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version("ds-pretrain") == pretrain.__version__
    assert released[0] == (pretrain.__version__, str(citation["date-released"]))
    assert citation["version"] == pretrain.__version__


@pytest.mark.parametrize(("schema", "files"), [("citation-file-format", "CITATION.cff"),
                                               ("github-workflows", "workflows/*.yml")])
def test_the_files_fit_their_schemas(schema: str, files: str) -> None:
    found = sorted(FOLDER.glob(files))
    assert found
    subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}",
                    "--default-filetype", "yaml", *found], check=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a repository of the working tree, with one commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("this copy of the files has no repository")
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All files"]):
        _git(*words, cwd=tmp_path)
    return tmp_path


def _release(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([".github/release.sh", *words], cwd=clone, capture_output=True, text=True,
                          env={**os.environ, "VENV": str(Path(sys.executable).parents[1])})


def test_a_release_needs_a_clean_tree_and_a_changelog(clone: Path) -> None:
    changelog, entry = clone / ".github/CHANGELOG.md", f"## [{pretrain.__version__}]"
    before, _, after = re.sub(r"(?<=## \[Unreleased\]\n).*?(?=## \[\d)", "\n", changelog.read_text(),
                              flags=re.DOTALL).partition(entry)
    kept = before + entry + after
    for text, problem in ((f"{before}- New.\n\n{entry}{after}", "unreleased entries"),
                          (kept.replace(entry, "## [0.0.1]"), f"there is no line `{entry}")):
        changelog.write_text(text)
        done = _release(clone, "changelog")
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
    changelog.write_text(kept)
    assert "uncommitted changes" in _release(clone, "tree").stderr
    _git("commit", "-aqm", "Changelog", cwd=clone)
    done = _release(clone, "tree", "changelog", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    _git("tag", f"v{pretrain.__version__}", cwd=clone)
    assert "exists" in _release(clone, "tree").stderr
