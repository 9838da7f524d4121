"""Kinds of documents, end to end: odd ones, duplicates, skipped ones, BOS; and the summary that counts them."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pretrain.data.prepare.tokenize_batch
import pretrain.data.text_inputs.reader
from pretrain.data.prepare import hash_tables
from pretrain.data.prepare.hash_tables import SeenDigests
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.summary import read_summary, summary_text
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from tests.data.prepare.helpers import TEXTS, TOOL, documents, jsonl, output, run_tool, word_tokenizer


def test_files_of_all_kinds(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """CRLF and whitespace are kept, a BOM at the beginning of a file is not; documents without text are left out."""
    lines = b'{"text": ""}\r\n{"text": "a\\ufeffb\\u0001"}\r\n\r\n{"text": "\\n"}'
    files = {"bom.txt": b"\xef\xbb\xbfafter a BOM", "crlf.txt": b"one\r\ntwo\r\n", "one.txt": b"x", "empty.txt": b"",
             "blank.txt": b" \n", "lines.jsonl": lines, "text.txt.gz": gzip.compress(TEXTS[0].encode()),
             "more.jsonl.gz": gzip.compress(b"\n \n" + lines)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    prepare([str(tmp_path / name) for name in files], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"))
    expected = ["after a BOM", "one\r\ntwo\r\n", "x", " \n", "a\ufeffb\1", "\n", TEXTS[0], "a\ufeffb\1", "\n"]
    assert documents(tmp_path / "out", tokenizer) == expected
    summary = read_summary(tmp_path / "out")
    assert summary["empty_documents"] == 3
    assert summary["text_bytes"] == sum(len(text.encode()) for text in expected)


def test_bos_and_eod(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, 10)
    prepare([jsonl(tmp_path / "a.jsonl", ["w3 w4", "", "unknown", " "])], tokenizer=str(path),
            out=str(tmp_path / "out"), settings=PrepareSettings(prepend_bos=True))
    data = IndexedDataset(tmp_path / "out")
    assert data.tokens(0, data.num_tokens).tolist() == [0, 3, 4, 1, 0, 2, 1]
    meta, summary = read_meta(tmp_path / "out"), read_summary(tmp_path / "out")
    assert meta is not None
    assert (meta["bos_token"], meta["eod_token"], summary["empty_documents"]) == (0, 1, 2)
    assert (summary["unknown_tokens"], summary["unknown_fraction"]) == (1, pytest.approx(1 / 7))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (70_000, "int32")])
def test_large_vocabularies(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    path = word_tokenizer(tmp_path, vocab_size)
    prepare([jsonl(tmp_path / "a.jsonl", [f"w{vocab_size - 1} w3"])], tokenizer=str(path), out=str(tmp_path / "out"))
    data = IndexedDataset(tmp_path / "out")
    assert data.dtype == np.dtype(dtype)
    assert data.tokens(0, 3).tolist() == [vocab_size - 1, 3, 1]


def test_a_token_beyond_the_vocabulary_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = word_tokenizer(tmp_path, 10)
    wrong = np.array([3, 65_540], np.int64)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: (wrong, np.array([2])))
    with pytest.raises(ConfigError, match="token 65540, and its vocabulary has only tokens 0 to 9"):
        prepare([jsonl(tmp_path / "a.jsonl", ["a"])], tokenizer=str(path), out=str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("deduplicate", [False, True])
def test_duplicates(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, deduplicate: bool) -> None:
    """The first occurrence is kept, also if documents continue over many batches."""
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 2048)
    long = TEXTS[0][:20_000]
    (tmp_path / "long.txt").write_text(long)
    lines = jsonl(tmp_path / "a.jsonl", ["one", "two", "one", long, "three", "one"])
    inputs = [lines, str(tmp_path / "long.txt"), lines]
    written = []
    for workers in (1, 2):
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(tmp_path / f"out{workers}"), workers=workers,
                settings=PrepareSettings(deduplicate=deduplicate))
        written.append(output(tmp_path / f"out{workers}"))
    assert written[0] == written[1]
    every = ["one", "two", "one", long, "three", "one"]
    expected = ["one", "two", long, "three"] if deduplicate else [*every, long, *every]
    assert documents(tmp_path / "out1", tokenizer) == expected
    summary = read_summary(tmp_path / "out1")
    assert (summary["documents"], summary["duplicate_documents"]) == (len(expected), 9)
    assert summary["text_bytes"] == sum(len(text.encode()) for text in expected)
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in expected)
    assert summary["tokens"] == IndexedDataset(tmp_path / "out1").num_tokens == tokens
    assert summary["longest_document"] == {"tokens": len(tokenizer.encode(long)) + 1, "place": f"{lines}:4"}


def test_duplicates_are_counted_up_to_a_limit(tmp_path: Path, tokenizer: Tokenizer,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    from pretrain.data.prepare import document_writer

    monkeypatch.setattr(document_writer, "_MOST_COUNTED", 3)
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 64)
    source = jsonl(tmp_path / "a.jsonl", ["one", "two", "three", "one"] * 5)
    prepare([source], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"))
    assert read_summary(tmp_path / "out")["duplicate_documents"] is None
    assert "not counted" in summary_text(tmp_path / "out")
    prepare([source], tokenizer=str(tokenizer.path), out=str(tmp_path / "again"),
            settings=PrepareSettings(deduplicate=True))
    assert read_summary(tmp_path / "again")["duplicate_documents"] == 17


def test_skipped_documents_are_counted_and_shown(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "good"}\n' + b'{"text": 5}\n{"text": "\xff"}\n{"txt"\n' * 10 + b'{"text": "end"}\n')
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    words = [str(bad), str(latin), "--tokenizer", str(tokenizer.path), "--out", str(tmp_path / "out")]
    stopped = run_tool(*words)
    note = "ds-pretrain: inputs: 1 file of JSON lines (bad.jsonl); 1 file of text (latin.txt)\n"
    assert (stopped.returncode, stopped.stdout, stopped.stderr.count("\n")) == (2, "", 2)
    assert stopped.stderr.startswith(note)
    assert "bad.jsonl:2: " in stopped.stderr
    done = run_tool(*words, "--on_error", "skip")
    assert done.returncode == 0
    assert done.stderr.startswith(note)
    assert documents(tmp_path / "out", tokenizer) == ["good", "end"]
    summary = read_summary(tmp_path / "out")
    assert summary["skipped_documents"] == 31
    assert len(summary["skipped_samples"]) == 20
    assert summary["skipped_samples"][0]["place"] == f"{bad}:2"
    assert "skipped documents  31\n    " in done.stdout
    assert f"{bad}:3: " in done.stdout


def test_a_tokenizer_is_trained_on_the_documents_that_can_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "the quick brown fox jumps over lazy dogs"}\n{"text": 5}\n' * 99)
    words = [str(bad), "--tokenizer", str(tmp_path / "tok"), "--out", str(tmp_path / "out"), "--on_error", "skip"]
    done = run_tool(*words, "--vocab_size", "300")
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / "out")["skipped_documents"] == 99
    other = run_tool(*words, "--overwrite", "--vocab_size", "310")
    assert other.returncode == 2
    assert "error: --vocab_size: found 310; expected 300, the size of " in other.stderr


def test_the_summary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"))
    summary = read_summary(tmp_path / "out")
    lengths = [len(tokenizer.encode(text)) + 1 for text in TEXTS]
    expected: dict[str, int] = {}
    for length in lengths:
        low = 2 ** (length.bit_length() - 1)
        name = f"{low}-{2 * low - 1}" if low > 1 else "1"
        expected[name] = expected.get(name, 0) + 1
    assert {name: count for name, count in summary["document_lengths"].items() if count} == expected
    assert summary["bytes_per_token"] == pytest.approx(sum(len(text.encode()) for text in TEXTS) / sum(lengths),
                                                       abs=1e-4)
    status = Path(source).stat()
    assert summary["settings"]["inputs"]["list"] == [[source, status.st_size, status.st_mtime_ns]]
    assert summary["settings"]["--tokenizer"] == tokenizer.fingerprint
    text = summary_text(tmp_path / "out")
    assert f"  tokens             {sum(lengths):,}\n" in text
    assert f"{max(lengths):,} tokens, {source}:{lengths.index(max(lengths)) + 1}" in text


def test_existing_output_is_kept_without_overwrite(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, second = jsonl(tmp_path / "a.jsonl", TEXTS), jsonl(tmp_path / "b.jsonl", TEXTS[::-1])
    where = {"tokenizer": str(tokenizer.path), "out": str(tmp_path / "out")}
    prepare([first], **where)
    before = output(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out\.bin exists. Give --overwrite to replace it, or another --out"):
        prepare([second], **where)
    assert output(tmp_path / "out") == before
    prepare([second], overwrite=True, **where)  # type: ignore[arg-type]
    assert documents(tmp_path / "out", tokenizer) == TEXTS[::-1]


def test_standard_input(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = Path(jsonl(tmp_path / "a.jsonl", TEXTS))
    with lines.open("rb") as file:
        done = subprocess.run([sys.executable, str(TOOL), "-", "--tokenizer", str(tokenizer.path), "--out",
                               str(tmp_path / "out"), "--workers=2"], stdin=file, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "out", tokenizer) == TEXTS


def test_a_long_text_gets_the_tokens_of_the_whole(tmp_path: Path, tokenizer: Tokenizer,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer encodes line by line, and a text is divided after a line."""
    monkeypatch.setattr(pretrain.data.prepare.tokenize_batch, "LONGEST_TEXT", 200)
    text = TEXTS[0]
    prepare([jsonl(tmp_path / "a.jsonl", [text])], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"))
    data = IndexedDataset(tmp_path / "out")
    assert data.tokens(0, data.num_tokens).tolist() == [*tokenizer.encode(text), tokenizer.eod_token]


def test_the_preparation_does_not_import_torch() -> None:
    """Each worker process would need its memory."""
    code = ("import sys, pretrain.data.prepare.prepare, pretrain.data.prepare.summary\n"
            "sys.exit(bool({'torch', 'deepspeed', 'transformers', 'pyarrow'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def random_digests(generator: np.random.Generator, count: int, different: int) -> np.ndarray:
    """Return `count` digests of at most `different` values; some have the same slot, or zeros in one half."""
    values = generator.integers(0, 2**64, (different, 2), np.uint64)
    values[::40, 0] = values[0, 0]  # the same slot, other digests
    values[::11, 0] = 0
    return values[generator.integers(0, different, count)]


@pytest.mark.parametrize("small_table_bytes", [1 << 25, 0])
def test_finds_the_same_as_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_table_bytes: int) -> None:
    """With 0 bytes, the pages of the table are given back to the kernel after each batch."""
    monkeypatch.setattr(hash_tables, "_SMALL_TABLE_BYTES", small_table_bytes)
    monkeypatch.setattr(hash_tables, "_BATCH", 64)
    generator = np.random.default_rng(1)
    log, known = tmp_path / "log", set()
    log.touch()
    seen = SeenDigests(tmp_path / "table", log, num_logged=0, first_slots=16)
    for number in range(60):
        digests = random_digests(generator, int(generator.integers(0, 200)), 3000)
        expected = []
        for digest in map(bytes, digests):
            expected.append(digest not in known)
            known.add(digest)
        found = seen.add(digests)
        assert found.tolist() == expected
        with log.open("ab") as file:
            file.write(digests[found].tobytes())
        if number % 20 == 10:  # as after a kill
            seen = SeenDigests(tmp_path / "table", log, num_logged=log.stat().st_size // 16, first_slots=16)
    assert log.stat().st_size == 16 * len(known)
    seen.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").touch()

    def no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hash_tables.os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left"):
        SeenDigests(tmp_path / "table", tmp_path / "log", num_logged=0)
