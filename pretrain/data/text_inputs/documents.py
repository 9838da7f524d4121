"""Decode a chunk into documents."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pretrain.data.text_inputs.chunk import Chunk, ReadSettings
from pretrain.data.text_inputs.find import Input
from pretrain.data.text_inputs.formats import utf16_error, utf16_problem
from pretrain.data.text_inputs.json_lines import text_of_json_line
from pretrain.data.text_inputs.reader import read_chunks
from pretrain.data.text_inputs.text import check_nul, decode_utf8
from pretrain.errors import ConfigError


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    where: str
    """file and line, or row"""


class Skipped(NamedTuple):
    """A document, or a part of one, that cannot be read: all pieces of this document must be dropped.

    A long document may have pieces before and, unless `ends_document`, after this one.
    """

    where: str
    reason: str
    ends_document: bool


def documents(chunk: Chunk, settings: ReadSettings) -> Iterator[Piece | Skipped]:
    """Yield the documents of a chunk. A document without text gives one piece without text.

    Raises ConfigError, which names file and line, for a document that cannot be read. With `skip_errors`, this document
    gives a `Skipped` instead.
    """
    for number, (line, data, ends) in enumerate(_parts(chunk, settings)):
        where = f"{chunk.name}: row {line}" if chunk.is_parquet else f"{chunk.name}:{line}"
        try:
            if chunk.error:
                raise ConfigError.from_line(chunk.error)
            if chunk.kind == "jsonl":
                yield Piece(text_of_json_line(data or b"", where, settings.jsonl_key), ends, where)
            elif chunk.kind == "text":
                is_first = chunk.start.offset == number == 0  # it begins the file
                yield Piece(plain_text(data or b"", chunk.name, line, is_first=is_first), ends, where)
            else:
                yield Piece(_value(data, where), ends, where)
        except ConfigError as error:
            if not settings.skip_errors:
                hint = " --on_error skip leaves out such documents." if settings.can_skip else ""
                raise ConfigError.from_line(str(error) + hint) from None
            place, reason = _split_message(str(error), where, chunk.name)
            yield Skipped(place, reason, ends)


def line_of(where: str) -> int:
    """Return the line or row of a place that `documents` made."""
    return int(where.rpartition(":")[2].removeprefix(" row "))


def _split_message(message: str, where: str, name: str) -> tuple[str, str]:
    """Return the place and the reason of an error. Its line may be another one than the document's in `where`."""
    if not message.startswith(f"{where}: "):
        where = message[: message.find(": ", len(name))]
    return where, message[len(where) + 2 :]


def read_pieces(inputs: Iterable[Input], settings: ReadSettings) -> Iterator[Piece]:
    """Yield the documents of all inputs. Raises ConfigError for a document that cannot be read.

    With `skip_errors`, this document is left out, but not the parts of a long one that could be read before the error.
    """
    for found in inputs:
        for chunk in read_chunks(found, settings):
            for piece in documents(chunk, settings):
                if isinstance(piece, Piece):
                    yield piece


def _parts(chunk: Chunk, settings: ReadSettings) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yield (line or row, content, whether the document ends) of each document, or part of one, in a chunk."""
    line = chunk.start.line
    if chunk.kind == "values":
        for number, value in enumerate(chunk.values, line):
            yield number, value, True
    elif chunk.kind == "jsonl":
        for number, json_line in enumerate(chunk.data.split(b"\n"), line):
            if json_line and not json_line.isspace():
                yield number, json_line, True
    elif chunk.kind == "text" and settings.document_separator:
        separator = settings.document_separator.encode()
        *complete, last = chunk.data.split(separator)
        for data in complete:
            yield line, data, True
            line += data.count(b"\n") + separator.count(b"\n")
        if last or not complete:  # no document follows a separator at the end
            yield line, last, chunk.ends_document
    else:
        yield line, chunk.data, chunk.ends_document


def plain_text(data: bytes, name: str, line: int, *, is_first: bool) -> str:
    """Return the text in `data`, which begins at line number `line`. Raises ConfigError that names file and line.

    is_first: whether `data` is the beginning of a file, where UTF-16 has a byte order mark.
    """
    if is_first and (encoding := utf16_problem(data)):
        raise utf16_error(f"{name}:{line}", encoding)
    text = decode_utf8(data, name, line)
    if b"\0" in data:
        line += data.count(b"\n", 0, data.index(b"\0"))
        raise ConfigError(f"{name}:{line}", problem="there is a NUL byte (0x00): the file is damaged, or no text",
                          remedy=r"remove NUL bytes with: tr -d '\000' < FILE")
    return text


def _value(data: bytes | None, where: str) -> str:
    if data is None:
        raise ConfigError(where, problem="the value is null", remedy="remove this row")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(where, problem=f"byte {error.start + 1} of the value, 0x{data[error.start]:02X}, is not valid"
                          " UTF-8") from None
    check_nul(text, where)
    return text
