"""Inputs of every format and compression are read in chunks, from any position, and decoded into documents."""

import random
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.text_inputs import parquet
from pretrain.data.text_inputs.chunk import BOM, Position, ReadSettings
from pretrain.data.text_inputs.documents import Skipped
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.text_inputs.reader import read_chunks
from pretrain.errors import ConfigError
from tests.data.text_inputs.reading import (
    BAD_LINES,
    SMALL,
    chunks_of,
    json_lines,
    read_texts,
    texts_of,
    write,
    write_parquet,
)
from tests.support.rejection import rejection

MANY = settings(max_examples=150, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TEXT = st.text(st.sampled_from('aB \n\r\t"\\/{}[],:é中😀\u2028\x01\x1f'), max_size=60)
COMPRESSIONS = st.sampled_from(["", "gzip", "zstd"])
CHUNK = st.integers(1, 70)
COMPRESSION_OF = {"gz": "gzip", "zst": "zstd"}


def check_every_resume(path: str, reading: ReadSettings, chunk_bytes: int, long_bytes: int) -> list[object]:
    """Return the documents, after checking that the chunks after each position are the same."""
    sizes = {"chunk_bytes": chunk_bytes, "long_bytes": long_bytes}
    chunks = chunks_of(path, reading, **sizes)
    assert [chunk.start for chunk in chunks[1:]] == [chunk.end for chunk in chunks[:-1]]
    plain = [replace(chunk, file_bytes=0) for chunk in chunks]
    for number, chunk in enumerate(chunks, 1):
        rest = chunks_of(path, reading, start=Position(*list(chunk.end)), **sizes)
        assert [replace(one, file_bytes=0) for one in rest] == plain[number:]
    assert sum(chunk.file_bytes for chunk in chunks) <= Path(path).stat().st_size
    return list(texts_of(chunks, reading))


@MANY
@given(texts=st.lists(TEXT, max_size=6), compression=COMPRESSIONS, chunk=CHUNK, long=CHUNK, ascii=st.booleans(),
       bom=st.booleans(), crlf=st.booleans(), ends=st.booleans())
def test_json_lines(tmp_path: Path, texts: list[str], compression: str, chunk: int, long: int, ascii: bool, bom: bool,
                    crlf: bool, ends: bool) -> None:
    data = json_lines(texts, ensure_ascii=ascii, newline="\r\n" if crlf else "\n")
    data = BOM * bom + (data if ends else data.rstrip())
    if not data:
        return
    path = write(tmp_path / "a", data, compression)
    assert check_every_resume(path, ReadSettings(format="jsonl"), chunk, long) == texts


@MANY
@given(texts=st.lists(st.text(st.sampled_from("abc \n\r-é中😀"), max_size=40), min_size=1, max_size=8),
       separator=st.sampled_from(["", "a", "\n", "\n\n", "-a-", "--", "aab", "😀", "abcab", " \n"]),
       compression=COMPRESSIONS, chunk=CHUNK, bom=st.booleans())
def test_text(tmp_path: Path, texts: list[str], separator: str, compression: str, chunk: int, bom: bool) -> None:
    text = (separator or "|").join(texts)
    if not text and not bom:
        return
    path = write(tmp_path / "a", BOM * bom + text.encode(), compression)
    expected = text.split(separator) if separator else [text]
    if len(expected) > 1 and not expected[-1]:
        del expected[-1]  # a separator at the end begins no document
    reading = ReadSettings(format="text", document_separator=separator)
    assert check_every_resume(path, reading, chunk, chunk) == expected


@MANY
@given(texts=st.lists(st.none() | TEXT, max_size=9), rows=st.integers(1, 4), chunk=CHUNK, long=CHUNK,
       copied=st.booleans())
def test_parquet(tmp_path: Path, texts: list[str | None], rows: int, chunk: int, long: int, copied: bool) -> None:
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=rows)
    with pytest.MonkeyPatch.context() as patch:
        if not copied:
            patch.setattr(parquet, "LONG_BYTES", 0)
        found = check_every_resume(path, ReadSettings(skip_errors=True), chunk, long)
    assert [None if isinstance(text, Skipped) else text for text in found] == texts


def test_an_empty_file_is_an_empty_document_once(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"text")
    reading = ReadSettings()
    for name, data in (("empty.txt", b""), ("bom.txt", BOM)):
        write(tmp_path / name, data)
        (found,) = (one for one in find_inputs([str(tmp_path)], reading).files if one.path.endswith(name))
        (chunk,) = read_chunks(found, reading)
        assert texts_of([chunk], reading) == [""]
        assert list(read_chunks(found, reading, start=chunk.end)) == []


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_truncated_compressed_file_is_rejected(tmp_path: Path, ending: str) -> None:
    """The second half is lost, or the file was cut after a member and a few bytes of the next one."""
    numbers = random.Random(0)
    data = json_lines([numbers.randbytes(2000).hex() for _ in range(100)])
    first = len(Path(write(tmp_path / "first", data[:len(data) // 2] * 2, COMPRESSION_OF[ending])).read_bytes()) // 2
    whole = Path(write(tmp_path / "whole", data, COMPRESSION_OF[ending])).read_bytes()
    assert len(read_texts(str(tmp_path / "whole"))) == 100
    for size in (len(whole) - 3, len(whole) * 3 // 4, first + 7):
        (tmp_path / f"cut.{ending}").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"cut\.{ending}: it cannot be read to its end: "):
            read_texts(str(tmp_path / f"cut.{ending}"))


def test_a_file_that_became_shorter_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", b"text " * 1000, "gzip")
    with pytest.raises(ConfigError, match="it has become shorter"):
        chunks_of(path, ReadSettings(), start=Position(6000))


def test_small_sizes_give_parts_of_long_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a", json_lines(["short", "long " * 20]))
    kinds = [chunk.kind for chunk in chunks_of(path, ReadSettings(), **SMALL)]
    assert kinds.count("part") >= 2


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("long_bytes", [1 << 22, 1])
def test_bad_json_lines(tmp_path: Path, name: str, long_bytes: int) -> None:
    """Long lines are read by other code."""
    line, message = BAD_LINES[name]
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n' + line + b'\n{"text": "next"}')
    found = read_texts(path, ReadSettings(skip_errors=True), chunk_bytes=1, long_bytes=long_bytes)
    assert (found[0], found[2]) == ("good", "next")
    assert isinstance(found[1], Skipped)
    assert found[1].where == f"{path}:2"
    error = rejection(read_texts, path, chunk_bytes=1, long_bytes=long_bytes)
    assert error == f"{path}:2: {found[1].reason}"
    if long_bytes > 1:
        assert message in error


def test_nested_keys(tmp_path: Path) -> None:
    lines = b'{"meta": {"text": "1"}}\n{"meta": {"text": "2"}, "meta.text": "3"}\n{"meta": "4"}\n'
    path = write(tmp_path / "a.jsonl", lines)
    found = read_texts(path, ReadSettings(jsonl_key="meta.text", skip_errors=True))
    assert found[:2] == ["1", "3"]
    assert isinstance(found[2], Skipped)
    assert "the JSON object has no key 'meta.text'" in found[2].reason


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\n--two\ncaf\xe9--three\0--\xef\xbb\xbffour--")
    reading = ReadSettings(document_separator="--", skip_errors=True)
    for chunk_bytes in (1, 5, 1000):
        found = read_texts(path, reading, chunk_bytes=chunk_bytes)
        assert (found[0], found[3:]) == ("one\n", ["\ufefffour"])  # only a BOM at the beginning is removed
        reasons = [one.reason for one in found if isinstance(one, Skipped)]
        assert reasons[0].startswith("found byte 0xE9; expected UTF-8 text")
        assert reasons[1].startswith("there is a NUL byte (0x00): the file is damaged, or no text")
    with pytest.raises(ConfigError, match=r"a\.txt:3: found byte 0xE9; expected UTF-8 text"):
        read_texts(path)


def test_a_bad_byte_skips_a_document_of_many_chunks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"good--" + b"text " * 50 + b"\xff" + b" text" * 50 + b"--good")
    found = read_texts(path, ReadSettings(document_separator="--", skip_errors=True), chunk_bytes=16)
    assert [one if isinstance(one, str) else None for one in found] == ["good", None, "good"]


def test_utf_16_is_skipped_or_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "Text".encode("utf-16"))
    (found,) = read_texts(path, ReadSettings(skip_errors=True))
    assert isinstance(found, Skipped)
    assert found.reason == "found UTF-16 text; expected UTF-8. Convert the file first: iconv -f UTF-16 -t UTF-8 FILE."
    little = write(tmp_path / "b.txt", "Text".encode("utf-16-le"))  # without a byte order mark
    with pytest.raises(ConfigError, match="there is a NUL byte"):
        read_texts(little)


def test_parquet_columns_and_values(tmp_path: Path) -> None:
    texts = ["first", None, "", "naïve 😀", "a\0"]
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=2)
    found = read_texts(path, ReadSettings(skip_errors=True))
    assert [found[0], *found[2:4]] == ["first", "", "naïve 😀"]
    assert isinstance(found[4], Skipped)
    assert found[4].reason.startswith("there is a NUL character (U+0000) at character 1")
    assert found[1] == Skipped(f"{path}: row 2", "the value is null. Remove this row.", True)
    for column, message in (
        ("txet", r"column 'txet': there is no such column\. Did you mean \"text\"\?"),
        ("words", r"column 'words': there is no such column\. Name the column of the text with --jsonl_key; the "
                  r"columns are number, text"),
        ("number", r"column 'number': found values of type int64; expected text"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_texts(path, ReadSettings(jsonl_key=column))


def test_parquet_types(tmp_path: Path) -> None:
    words = ["a", "b", "a", None]
    plain = pyarrow.array(words)
    for name, column in {
        "dictionary": plain.dictionary_encode(), "large": plain.cast(pyarrow.large_string()),
        "binary": plain.cast(pyarrow.binary()), "view": plain.cast(pyarrow.string_view()),
    }.items():
        struct = pyarrow.StructArray.from_arrays([column, plain], ["text", "other"])
        table = pyarrow.table({"text": column, "meta": struct})
        pyarrow.parquet.write_table(table, tmp_path / name)
        for key in ("text", "meta.text"):
            found = read_texts(str(tmp_path / name), ReadSettings(jsonl_key=key, skip_errors=True))
            assert [text if isinstance(text, str) else None for text in found] == words, (name, key)


def test_damaged_parquet_is_rejected(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / "a.parquet", [str(number) * 50 for number in range(10_000)]))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\0" * 2000 + data[len(data) // 2 + 2000:])
    with pytest.raises(ConfigError, match=r"a\.parquet: it cannot be read to its end: "):
        read_texts(str(path))
    path.write_bytes(data[:-100])
    with pytest.raises(ConfigError, match=r"a\.parquet: this Parquet file is damaged: "):
        read_texts(str(path))


def test_values_and_lines_are_complete_in_chunks(tmp_path: Path) -> None:
    """A chunk is about as large as it should be, whatever the documents."""
    texts = ["x" * (number % 700) for number in range(3000)]
    for path in (write(tmp_path / "a", json_lines(texts)), write_parquet(tmp_path / "b", texts)):
        chunks = chunks_of(path, ReadSettings(), chunk_bytes=5000)
        assert all(3000 < chunk.num_bytes <= 5000 for chunk in chunks[:-1])


@pytest.mark.parametrize("long_bytes", [1 << 22, 1])
def test_a_number_may_have_any_number_of_digits(tmp_path: Path, long_bytes: int) -> None:
    path = write(tmp_path / "a", b'{"n": ' + b"9" * 5000 + b', "text": "kept"}\n')
    assert read_texts(path, chunk_bytes=1, long_bytes=long_bytes) == ["kept"]
