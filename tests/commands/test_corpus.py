"""Corpus of Python sources: split, reproducibility, and skipped files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.commands.corpus import python_corpus
from pretrain.errors import ConfigError

TOOL = Path(__file__).parents[2] / "tools" / "make_corpus.py"


def rows(path: Path) -> dict[str, str]:
    return {row["path"]: row["text"] for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    for number in range(200):
        path = folder / f"package{number % 7}" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"x = {number}  # é\r\n".encode() * 50)
    return folder


def test_split_by_file(tmp_path: Path, sources: Path) -> None:
    made = python_corpus(tmp_path / "out", source=sources)
    train, valid = rows(made.train), rows(made.valid)
    assert len(train) + len(valid) == made.num_documents == 200
    assert not set(train) & set(valid)
    assert 2 <= len(valid) <= 25, "about 5%"
    for name, text in (train | valid).items():
        assert text.encode() == (sources / name).read_bytes()
    assert made.num_bytes == sum(len(text.encode()) for text in (train | valid).values())
    assert list(train) != sorted(train), "files must not be sorted"


def test_corpus_is_reproducible_and_files_stay_in_their_split(tmp_path: Path, sources: Path) -> None:
    first = python_corpus(tmp_path / "out", source=sources)
    again = python_corpus(tmp_path / "again", source=sources)
    assert first.train.read_bytes() == again.train.read_bytes()
    (sources / "package0" / "m0.py").unlink()
    (sources / "new.py").write_text("new = 1\n")
    changed = python_corpus(tmp_path / "changed", source=sources)
    assert not set(rows(changed.train)) & set(rows(first.valid))


def test_unusable_files_are_skipped(tmp_path: Path, sources: Path) -> None:
    (sources / "latin.py").write_bytes(b"# caf\xe9\n")
    (sources / "long.py").write_text("x = 1\n" * 200_000)
    (sources / "empty.py").write_text("\n")
    (sources / "copy.py").write_bytes((sources / "package0" / "m0.py").read_bytes())
    for other in ("site-packages", "dist-packages", "__pycache__"):
        (sources / other).mkdir()
        (sources / other / "x.py").write_text(f"other = {other!r}\n")
    made = python_corpus(tmp_path / "out", source=sources)
    names = set(rows(made.train)) | set(rows(made.valid))
    assert made.num_documents == 200
    assert names <= {path.relative_to(sources).as_posix() for path in sources.glob("package*/*")} | {"copy.py"}


def test_megabytes_limits_the_corpus(tmp_path: Path, sources: Path) -> None:
    made = python_corpus(tmp_path / "out", source=sources, megabytes=0.1)
    assert 0.08e6 < made.num_bytes <= 0.1e6


def test_too_few_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"0 usable \.py files"):
        python_corpus(tmp_path / "out", source=tmp_path / "nothing")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_tool_writes_both_splits(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOL), str(tmp_path / "out"), "--megabytes", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    assert "MB of text" in done.stdout
    assert len(rows(tmp_path / "out" / "train.jsonl")) > len(rows(tmp_path / "out" / "valid.jsonl")) > 0
