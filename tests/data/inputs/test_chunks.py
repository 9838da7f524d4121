"""The documents of an input do not depend on chunks, compression or the position at which a resume begins."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.text_inputs import parquet
from pretrain.data.text_inputs.chunk import BOM, Position, ReadSettings
from pretrain.data.text_inputs.documents import Skipped
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.text_inputs.reader import read_chunks
from pretrain.errors import ConfigError
from tests.data.inputs.reading import (
    SMALL,
    chunks_of,
    json_lines,
    read_texts,
    texts_of,
    write,
    write_parquet,
)

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
