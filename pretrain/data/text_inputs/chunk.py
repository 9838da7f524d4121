"""The parts in which inputs are read, and the settings of reading."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.errors import ConfigError

CHUNK_BYTES = 1 << 19
LONG_BYTES = 4 << 20
"""a JSON line or a Parquet value with more bytes is read in parts, to limit the memory"""
FORMATS = ("auto", "text", "jsonl", "parquet")
BOM = b"\xef\xbb\xbf"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "\\": "\\"}
_LONGEST_SEPARATOR = 1024  # bytes


class Position(NamedTuple):
    """Position at which a chunk of an input begins. A chunk depends only on it, not on the chunks before it."""

    offset: int = 0  # bytes of the decompressed input; rows of a Parquet file
    line: int = 1  # number of the line at `offset`
    parts: int = 0  # chunks already read of the long line or long value (or empty file) at `offset`

    def at_line_start(self) -> "Position":
        """Return the beginning of the long line or value that this position is in."""
        return self._replace(parts=0)


BEGINNING = Position()


@dataclass(frozen=True)
class ReadSettings:
    """Settings of the reading of documents. The fields are flags of `ds-pretrain prepare`."""

    format: str = "auto"
    jsonl_key: str = "text"
    """key of the text in a JSON object, name of its column in a Parquet file; "a.b" is key b of the object at key a"""
    document_separator: str = ""
    """text between two documents of a text file; empty: a text file is one document"""
    skip_errors: bool = False
    """skip documents that cannot be read, instead of raising ConfigError"""
    can_skip: bool = False
    """the program has the flag --on_error skip; errors name it"""


@dataclass(frozen=True)
class Chunk:
    """A part of an input: complete JSON lines, complete Parquet values, or a piece of text.

    `kind` is "jsonl", "values", "text" (which may contain separators) or "part" (of one long JSON string or value).
    """

    name: str
    """the input's path, for messages"""
    kind: str
    start: Position
    end: Position
    """the position after this chunk, at which the next chunk begins"""
    file_bytes: int
    """bytes that this chunk takes in the file on disk (compressed bytes of a compressed file), for a progress bar"""
    data: bytes = b""
    values: tuple[bytes | None, ...] = ()
    ends_document: bool = True
    """of "text" and "part": whether a document ends where the chunk ends"""
    error: str = ""
    """why the document that ends here is not valid"""
    is_parquet: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of the content in memory."""
        return len(self.data) + sum(len(value or b"") for value in self.values)


def parse_separator(word: str) -> str:
    r"""Return the separator that `word` spells: \n, \t, \r, \f, \\, \xHH and \uHHHH are escapes. Raises ConfigError."""
    where = "--document_separator"

    def character(match: "re.Match[str]") -> str:
        if match[1]:
            return chr(int(match[1], 16))
        if match[2]:
            return chr(int(match[2], 16))
        if match[3] not in _ESCAPES:
            raise ConfigError(where, problem=f"{match[0]} is not an escape", remedy="write \\\\ for a backslash")
        return _ESCAPES[match[3]]

    text = re.sub(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.|$))", character, word, flags=re.DOTALL)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(where, problem="it contains a lone surrogate, which no text contains") from None
    if not 0 < size <= _LONGEST_SEPARATOR:
        raise ConfigError(where, found=f"{size} bytes", expected=f"1 to {_LONGEST_SEPARATOR} bytes")
    return text
