"""Documents that cannot be read: the message names file and line, or the document is skipped."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import Skipped
from pretrain.errors import ConfigError
from tests.data.inputs.reading import BAD_LINES, chunks_of, json_lines, read_texts, write, write_parquet


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
    with pytest.raises(ConfigError) as error:
        read_texts(path, chunk_bytes=1, long_bytes=long_bytes)
    assert str(error.value) == f"{path}:2: {found[1].reason}"
    if long_bytes > 1:
        assert message in str(error.value)


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
