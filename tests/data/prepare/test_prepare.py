"""Tokenizing files: the output does not depend on the number of workers, and errors name file and line."""

import gzip
import os
import re
import sys
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest

import pretrain.data.text_inputs.reader
from pretrain import progress
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from tests.data.prepare.helpers import ENDINGS, SOURCES, TEXTS, documents, jsonl, output, run_tool, word_tokenizer
from tests.support.rejection import rejection
from tests.wrong_inputs.case import main_of


def test_meta_json_describes_the_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    done = prepare([source], tokenizer=str(tokenizer.path.parent), out=str(tmp_path / "out"))
    tokens = IndexedDataset(tmp_path / "out").tokens(0, done.num_tokens)
    status = Path(source).stat()
    fractions = np.unique(tokens, return_counts=True)[1] / len(tokens)
    expected = {
        "vocab_size": 600, "tokenizer": str(tokenizer.path), "tokenizer_sha256": tokenizer.fingerprint,
        "bos_token": None, "eod_token": 1,
        "num_tokens": sum(len(tokenizer.encode(text)) + 1 for text in TEXTS), "num_documents": len(TEXTS),
        "max_token": int(tokens.max()), "entropy_nats": pytest.approx(float(-(fractions * np.log(fractions)).sum())),
        "sources": {"files": 1, "bytes": status.st_size, "sha256_of_list": ANY, "list": [
            {"path": source, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}]},
        "filters": {"on_error": "stop", "deduplicate": False}}
    assert vars(done) == expected
    meta = read_meta(tmp_path / "out") or {}
    assert {key: meta[key] for key in expected} == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", *(f"out.{ending}" for ending in ENDINGS)]


@pytest.mark.parametrize("chunk_bytes", [1, 100, 5000])
def test_every_chunk_size_gives_the_same_documents(tmp_path: Path, tokenizer: Tokenizer,
                                                   monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Chunks may end inside long lines, multi-byte characters and line ends."""
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", chunk_bytes)
    texts = [TEXTS[0][:3000], "x" * 300 + "😀é\u2581" * 50 + " y" * 100, "\r\n" * 20]
    inputs = [jsonl(tmp_path / "a.jsonl", texts)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
        inputs.append(str(tmp_path / f"{number}.txt"))
    prepare(inputs, tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), workers=1)
    assert documents(tmp_path / "out", tokenizer) == texts * 2


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, tokenizer: Tokenizer,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    inputs = [jsonl(tmp_path / "a.jsonl", TEXTS * 2), *map(str, SOURCES)]
    written = []
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(out), workers=workers)
        written.append(output(out))
    assert written[0] == written[1] == written[2]
    assert documents(tmp_path / "out3", tokenizer) == TEXTS * 2 + TEXTS[: len(SOURCES)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_reported_and_the_old_files_remain(tmp_path: Path, tokenizer: Tokenizer, workers: int,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    good = jsonl(tmp_path / "good.jsonl", TEXTS)
    prepare([good], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(Path(good).read_bytes() + b'{"text": "cut of\n')
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:{len(TEXTS) + 1}: it is not valid JSON: Unterminated string"):
        prepare([good, str(bad)], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), workers=workers,
                overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before


def test_the_tool_passes_its_flags(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS, key="body")
    out = tmp_path / "new" / "out"
    done = run_tool(source, "--tokenizer", str(tokenizer.path), "--out", str(out), "--jsonl-key=body",
                    "--no-append-eod")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"documents +{len(TEXTS)}\n", done.stdout)
    assert documents(out, tokenizer, eod=False) == TEXTS


@pytest.mark.parametrize(("words", "message"), [
    (["IN/folder"], "folder: this folder has no files to read"),
    (["IN/empty.txt"], "empty.txt: there is no text"),
    (["IN/blank.jsonl"], "blank.jsonl: there is no document that is not empty"),
    (["IN/latin.txt"], "latin.txt:2: found byte 0xE9; expected UTF-8 text"),
    (["IN/cut.txt.gz"], "cut.txt.gz: it cannot be read to its end: Compressed file ended before"),
    (["IN/good.txt", "--workers", "0"], "--workers: found '0'; expected a whole number from 1"),
    (["IN/good.txt", "--tokenizer", "IN"], "the folder contains neither"),
    (["IN/good.txt", "--out", "IN/good.txt/out"], "good.txt is a file"),
    (["IN/good.txt", "--outt", "x"], 'Did you mean "--out"?'),
    ([], "INPUT: neither an input nor --dataset is given"),
])  # fmt: skip
def test_the_tool_rejects_in_one_line(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
                                      words: list[str], message: str) -> None:
    files = {"good.txt": b"good", "empty.txt": b"", "blank.jsonl": b'\n{"text": ""}\n', "latin.txt": b"a\ncaf\xe9",
             "cut.txt.gz": gzip.compress(os.urandom(1000))[:-100]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    words = [word.replace("IN", str(tmp_path)) if word.startswith("IN") else word for word in words]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "--tokenizer", str(tokenizer.path), "--out",
                                      str(tmp_path / "out"), *words])
    assert message in rejection(main_of("prepare"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, "folder"])


def test_a_tokenizer_without_eod_is_rejected_by_default(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, 10)
    path.write_text(path.read_text().replace("</s>", "<other>"))
    (tmp_path / "a.txt").write_text("w3 w4 w3 w4")
    where = {"tokenizer": str(path), "out": str(tmp_path / "out")}
    with pytest.raises(ConfigError, match="it has no end-of-document token"):
        prepare([str(tmp_path / "a.txt")], **where)
    done = prepare([str(tmp_path / "a.txt")], settings=PrepareSettings(append_eod=False), **where)
    assert done.num_tokens == 4


def test_a_log_file_gets_a_progress_line_at_intervals(capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.ProgressBar("tokenizing", 40_000_000) as shown:
        for _ in range(4):
            now[0] += 6
            shown.advance(10_000_000, "5 documents")
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 50%, 20.0 MB, 1.7 MB/s, 5 documents, ETA 0:00:12",
        "tokenizing: 100%, 40.0 MB, 1.7 MB/s, 5 documents"]
