"""Detection of formats by content, the order of folders and globs, and inputs that cannot be read and are rejected."""

import gzip
import io
import os
import re
import sys
from pathlib import Path

import pytest

from pretrain.data.text_inputs.chunk import ReadSettings, parse_separator
from pretrain.data.text_inputs.documents import read_pieces
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.text_inputs.reader import read_chunks
from pretrain.errors import ConfigError
from tests.data.text_inputs.reading import json_lines, one, read_texts, texts_of, write, write_parquet
from tests.support.rejection import rejection

JSONL = json_lines(["first", "second"])
LONG_LINE = json_lines(["long " * 40_000])
DETECTED = {
    # name: (content, kind)
    "part-00000": (JSONL, "jsonl"),
    "x.JSONL": (JSONL, "jsonl"),
    "lines.txt": (JSONL, "jsonl"),
    "one-line": (LONG_LINE, "jsonl"),
    "blank-lines": (b"\n \r\n" + JSONL, "jsonl"),
    "bom.jsonl": (b"\xef\xbb\xbf" + JSONL, "jsonl"),
    "second-line-bad.jsonl": (JSONL + b"{\n", "jsonl"),
    "first-line-bad.jsonl": (b'{"text": "a\n' + JSONL, "jsonl"),
    "empty.jsonl": (b"", "jsonl"),
    "brace.txt": (b"{ \\bf bold } text\nmore", "text"),
    "code.c": (b"{\n  int i;\n}\n", "text"),
    "long-brace.txt": (b"{" + b"text " * 40_000, "text"),
    "link.md": (b"[a](b)\n[c](d)\n", "text"),
    "inner.md": (b"# Example\n" + JSONL, "text"),
    "words": (b"some words", "text"),
    "blank": (b"\n\n", "text"),
    "text.parquet": (b"text", "text"),
    "plain.txt.gz": (b"text", "text"),
}


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
@pytest.mark.parametrize("name", DETECTED)
def test_the_format_is_told_by_the_content(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str,
                                           compression: str) -> None:
    content, kind = DETECTED[name]
    write(tmp_path / "other", b"text")
    path = write(tmp_path / name, content, compression)
    found = find_inputs([path, str(tmp_path / "other")], ReadSettings()).files[0]
    assert (found.kind, found.compression) == (kind, compression)
    assert capfd.readouterr() == ("", "")  # Arrow prints complaints about streams


REJECTED = {
    # name: (content, message)
    "a.jsonl": (b"words\n", ":1: this line is not a JSON object, although the file's name says so. "
                            "Give --format text"),
    "b.jsonl": (b"\n{words\n", ":2: this line is not valid JSON: Expecting property name"),
    "c.json": (b'[\n {"text": "a"},\n {"text": "b"}]', ":1: this looks like a JSON list that takes several lines. "
                                                        "Convert it to JSON lines with: jq -c '.[]' FILE"),
    "d": (b'{\n  "text": "a"\n}', ":1: this looks like a JSON object that takes several lines. Convert it to JSON "
                                  "lines with: jq -c . FILE; or, if it is text, give --format text"),
    "e": (JSONL + b"words\n", "e: line 1 is a JSON object, and line 3 is not. Choose with --format jsonl or --format"
                              " text"),
    "f": (b"{words\n" + JSONL, "f: line 2 is a JSON object, and line 1 is not. Choose"),
    "g.txt": ("words".encode("utf-16"), "g.txt: found UTF-16 text; expected UTF-8. Convert the file first: iconv -f "
                                        "UTF-16 -t UTF-8 FILE"),
    "c.jsonl": (b"<!DOCTYPE html><title>404", "c.jsonl: this is a web page (HTML), although the file's name says "
                                              "otherwise"),
    "l.parquet": (b"<html>", "l.parquet: this is a web page (HTML), although"),
    "h": (b"BZh91AY", "h: this is a bzip2 file, which is not read. Decompress it first: bunzip2 FILE"),
    "i.idx": (b"MMIDIDX\0\0", "i.idx: this is an index of token files, which is not read"),
    "j": (b"name".ljust(257, b"\0") + b"ustar", "j: this is a tar archive, which is not read. Unpack it first"),
    "k.parquet": (b"PAR1 and nothing else", "k.parquet: this Parquet file is damaged: "),
}


@pytest.mark.parametrize("name", REJECTED)
def test_content_that_is_in_doubt_or_not_supported_is_rejected(tmp_path: Path, name: str) -> None:
    content, message = REJECTED[name]
    assert message in rejection(find_inputs, [write(tmp_path / name, content)], ReadSettings())


OTHERS = {  # as `file` knows them; each has its first bytes
    "a.pdf": (b"%PDF-1.7\n", "PDF document"), "b.png": (b"\x89PNG\r\n\x1a\n\0", "PNG image"),
    "c.epub": (b"PK\x03\x04" + bytes(26) + b"mimetypeapplication/epub+zip", "EPUB book"),
    "d.docx": (b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml", "Office document"),
    "e.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    "f.zip": (b"PK\x03\x04" + bytes(26) + b"a.txt", "zip archive"), "g.npy": (b"\x93NUMPY\1\0", "NumPy file"),
    "h.warc": (b"WARC/1.0\r\n", "WARC file"), "i.jpg": (b"\xff\xd8\xff\xe0", "JPEG image"),
    "j.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "document of an old Office program"),
}


def test_files_without_text_are_listed_at_once_by_kind(tmp_path: Path) -> None:
    """Also inside of gzip. With skip_errors they are left out, and described; a folder without text is an error."""
    for name, (content, _) in OTHERS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "z.png.gz").write_bytes(gzip.compress(OTHERS["b.png"][0]))
    (tmp_path / "page.html").write_text("<!doctype html><p>words")
    line = rejection(find_inputs, [str(tmp_path)], ReadSettings(can_skip=True))
    assert line.startswith(f"{len(OTHERS) + 1} files: they are not read: 1 PDF document (")
    assert "2 PNG images (" in line
    assert all(what in line for _, what in OTHERS.values())
    assert line.endswith("Convert or move them; --on_error skip leaves them out.")
    assert rejection(find_inputs, [str(tmp_path / "a.pdf")], ReadSettings(can_skip=True, skip_errors=True)) == \
        f"{tmp_path}/a.pdf: this is a PDF document, which is not read. Convert it to text first: pdftotext FILE."
    inputs = find_inputs([str(tmp_path)], ReadSettings(skip_errors=True))
    assert [Path(file.path).name for file in inputs.files] == ["page.html"]
    assert "; left out: 1 PDF document (" in inputs.describe()
    assert inputs.describe().endswith("; 1 web page (HTML: page.html), whose markup becomes tokens, too")


def test_a_given_format_overrides_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", JSONL + b"words")
    assert read_texts(path, ReadSettings(format="text")) == [(JSONL + b"words").decode()]
    parquet = write_parquet(tmp_path / "a.parquet", ["a"])
    for format, word in (("text", parquet), ("parquet", path)):
        with pytest.raises(ConfigError, match=r"this is (a Parquet file; text is expected|not a Parquet file)"):
            find_inputs([word], ReadSettings(format=format))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for name in ("b/2.txt", "b/10.txt", "a.txt", "z/deep/x.txt", ".git/config", "b/.hidden", "_SUCCESS", "a.txt.sha256",
                 "__init__.py", "README.md", "b/dataset_info.json", "__pycache__/a.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "link.txt").symlink_to(root / "b" / ".hidden")
    return root


def names(words: list[str], root: Path) -> list[str]:
    return [str(Path(file.path).relative_to(root)) for file in find_inputs(words, ReadSettings()).files]


def test_folders_and_globs_are_sorted_and_words_keep_their_order(folder: Path) -> None:
    assert names([f"{folder}/b/*.txt", f"{folder}/a.txt"], folder) == ["b/10.txt", "b/2.txt", "a.txt"]
    assert names([f"{folder}/z*", f"{folder}/b/.hidden"], folder) == ["z/deep/x.txt", "b/.hidden"]
    assert names([f"{folder}/**/[x1]*.txt"], folder) == ["b/10.txt", "z/deep/x.txt"]
    (folder / "z" / "loop").symlink_to(folder)
    all_files = ["README.md", "__init__.py", "a.txt", "b/10.txt", "b/2.txt", "link.txt", "z/deep/x.txt"]
    assert names([str(folder)], folder) == all_files
    (folder / "a[1].txt").write_text("a name with brackets")
    assert names([f"{folder}/a[1].txt"], folder) == ["a[1].txt"]


def test_the_description_names_formats_and_files_that_are_not_read(folder: Path) -> None:
    write(folder / "lines.gz", JSONL, "gzip")
    words = [str(folder), str(folder / "a.txt"), write_parquet(folder / "c.parquet", ["a"])]
    inputs = find_inputs(words, ReadSettings())
    line = inputs.describe()
    assert line == ("inputs: 8 files of text (README.md, __init__.py, a.txt, ...); 2 files of Parquet (c.parquet, "
                    "c.parquet); 1 file of JSON lines, gzip (lines.gz); 2 of them are read again, because they are "
                    "named twice; not read: .git, .hidden, _SUCCESS, ... (6 hidden or side files of folders)")
    alone = find_inputs([str(folder / "lines.gz")], ReadSettings())
    assert alone.describe() == "inputs: 1 file of JSON lines, gzip"
    assert inputs.is_mixed
    assert not alone.is_mixed


@pytest.mark.parametrize(("word", "message"), [
    ("nowhere.txt", "nowhere.txt: there is no such file"),
    ("none*.txt", "none*.txt: no file matches this pattern"),
    ("empty", "empty: this folder has no files to read"),
    ("broken", "broken: this link leads to no file"),
    ("pipe", "pipe: it is neither a file nor a folder. To read a pipe, give - and redirect standard input"),
    ("empty.txt", "empty.txt: there is no text. Give files that are not empty"),
])  # fmt: skip
def test_words_that_name_no_file_are_rejected(tmp_path: Path, word: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_inputs([str(tmp_path / word)], ReadSettings())


class _Pipe(io.RawIOBase):
    """Standard input that is not seekable, and gives few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        part, self._data = self._data[: min(len(buffer), 999)], self._data[min(len(buffer), 999):]
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_standard_input_is_read_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                                compression: str) -> None:
    texts = [f"document {number} " * 100 for number in range(1000)]
    data = json_lines(texts) if kind == "jsonl" else "".join(texts).encode()
    packed = Path(write(tmp_path / "a", data, compression)).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(_Pipe(packed))))
    found = one("-")
    assert (found.kind, found.compression, found.can_resume) == (kind, compression, False)
    chunks = list(read_chunks(found, ReadSettings()))
    assert texts_of(chunks, ReadSettings()) == (texts if kind == "jsonl" else ["".join(texts)])
    assert sum(chunk.file_bytes for chunk in chunks) <= len(packed)


def test_a_file_name_that_is_not_utf_8(tmp_path: Path) -> None:
    write(tmp_path / os.fsdecode(b"caf\xe9.txt"), b"text\n\xff")
    (found,) = find_inputs([str(tmp_path)], ReadSettings()).files
    assert found.name == rf"{tmp_path}/caf\xe9.txt"
    with pytest.raises(ConfigError, match=r"caf\\xe9\.txt:2: found byte 0xFF"):
        list(read_pieces([found], ReadSettings()))


def test_standard_input_can_be_given_once() -> None:
    with pytest.raises(ConfigError, match="standard input can be read only once"):
        find_inputs(["-", "-"], ReadSettings())


@pytest.mark.parametrize(("word", "text"), [
    (r"\n\n\n", "\n\n\n"), ("<|endoftext|>", "<|endoftext|>"), (r"\r\n---\r\n", "\r\n---\r\n"), (r"\\n", r"\n"),
    (r"\x1e", "\x1e"), (r"\u4e2d\t", "中\t"), ("\n", "\n"),
])  # fmt: skip
def test_escapes_in_separators(word: str, text: str) -> None:
    assert parse_separator(word) == text


@pytest.mark.parametrize(("word", "message"), [
    (r"\q", r"\q is not an escape. Write \\ for a backslash"), ("a\\", "is not an escape"), ("", "found 0 bytes"),
    (r"\ud800", "lone surrogate"), ("x" * 2000, "found 2000 bytes; expected 1 to 1024 bytes"),
    (r"\x1", "not an escape"),
])  # fmt: skip
def test_bad_separators_are_rejected(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_separator(word)


def test_a_separator_without_a_text_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--document_separator: it has no effect"):
        find_inputs([write(tmp_path / "a", JSONL)], ReadSettings(document_separator="a"))


def test_pieces_of_several_inputs(tmp_path: Path) -> None:
    files = [write(tmp_path / "a", JSONL), write_parquet(tmp_path / "b", ["third"])]
    found = find_inputs(files, ReadSettings()).files
    assert [piece.text for piece in read_pieces(found, ReadSettings())] == ["first", "second", "third"]
