"""The filter of documents of pretrain/extensions/README.md: the same files with any workers, shards and kills."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import REJECTED
from tests.data.prepare.helpers import jsonl, output
from tests.support.launch import ROOT

PAGE = (ROOT / "pretrain/extensions/README.md").read_text()
CODE = re.findall(r"```python\n(# letters.py\n.*?)```", PAGE, re.DOTALL)[0]
GOOD, BAD = "these are letters ", "1234567 "


def run(folder: Path, *words: str, extension: str = "letters:EXTENSION") -> subprocess.CompletedProcess[str]:
    named = ["--extension", extension] if extension else []
    return subprocess.run([sys.executable, "-m", "pretrain", *named, *words], cwd=folder, text=True, check=False,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the filter, documents of which every third one is numbers, and a long document that is read in parts."""
    (tmp_path / "letters.py").write_text(CODE)
    jsonl(tmp_path / "a.jsonl", [(GOOD if number % 3 else BAD) * (10 + number % 50) for number in range(3000)])
    (tmp_path / "good.txt").write_text(GOOD * 60_000 + BAD * 60_000)
    (tmp_path / "bad.txt").write_text(GOOD * 20_000 + BAD * 120_000)
    return tmp_path


def test_the_filter(folder: Path) -> None:
    words = ["prepare", "a.jsonl", "good.txt", "bad.txt", "a.jsonl", "--tokenizer", "bytes", "--least_letters", "0.5"]
    done = run(folder, *words, "--workers", "1", "--out", "one")
    assert done.returncode == 0, done.stderr
    assert "  few letters        2,001 (removed)\n" in done.stdout
    expected = output(folder / "one")
    summary, meta = json.loads(expected["summary.json"]), json.loads(expected["meta.json"])
    assert (summary["documents"], summary["few_letters"], meta["num_documents"]) == (4001, 2001, 4001)
    assert meta["filters"]["--least_letters"] == summary["settings"]["--least_letters"] == 0.5
    assert run(folder, *words, "--workers", "3", "--out", "three").returncode == 0
    assert output(folder / "three") == expected
    if not (ROOT / "pretrain/extensions/merge_split").is_dir():
        return
    for index in range(2):
        assert run(folder, *words, "--out", "parts", "--shard", f"{index}/2").returncode == 0
    without = run(folder, "data", "merge", "parts", extension="")
    assert (without.returncode, "was made with the extension letters" in without.stderr) == (REJECTED, True)
    assert run(folder, "data", "merge", "parts").returncode == 0
    assert output(folder / "parts") == expected
    (folder / "parts.shard-00001-of-00002.bin").unlink()
    again = f"Run `ds-pretrain --extension letters:EXTENSION {' '.join(words)} --out parts --shard 1/2 --overwrite`"
    assert again in run(folder, "data", "merge", "parts", "--overwrite").stderr
    assert run(folder, *words[:-1], "0.9", "--out", "parts", "--shard", "1/2", "--overwrite").returncode == 0
    assert "different: --least_letters." in run(folder, "data", "merge", "parts", "--overwrite").stderr


def test_without_its_flag_nothing_is_filtered(folder: Path) -> None:
    words = ["prepare", "a.jsonl", "--tokenizer", "bytes", "--out"]
    assert run(folder, *words, "with").returncode == run(folder, *words, "without", extension="").returncode == 0
    assert output(folder / "with") == output(folder / "without")
