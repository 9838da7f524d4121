"""Decode, check and divide text."""

import json
from typing import Any

from pretrain.errors import ConfigError


def decode_utf8(data: bytes, path: str, first_line: int) -> str:
    """Decode UTF-8. Raises ConfigError that names file and line; `first_line` is the number of the first line."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}", found=f"byte 0x{data[error.start]:02X}", expected="UTF-8 text",
                          remedy="convert the file first, for example with iconv -t UTF-8") from None


def check_unicode(text: str, where: str) -> None:
    """Raise ConfigError for text that UTF-8 cannot represent: tokenizers replace such characters in different ways."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ConfigError(where, problem=f"there is a lone surrogate {code} at character {error.start}",
                          remedy="correct or remove this document") from None


def check_nul(text: str, where: str) -> None:
    """Raise ConfigError for a document with a NUL character."""
    if "\0" in text:
        raise ConfigError(where, problem=f"there is a NUL character (U+0000) at character {text.index(chr(0))}: the "
                          "document is damaged, or no text", remedy="correct or remove this document")


def parse_json(text: str) -> Any:
    """Parse JSON. A number may have any number of digits: Python's int takes at most 4,300. Raises ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=float)


def text_cut(data: bytes) -> int:
    """Return the position to divide a text at: after the last line, else before the last space or character."""
    cut = data.rfind(b"\n") + 1 or data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 0 and data[cut] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        cut -= 1
    return cut or len(data)


def separator_cut(data: bytes, separator: bytes, size: int) -> int:
    """Return the position to divide a text with separators at: after the last one in `size` bytes, else outside of all.

    `data` has up to len(separator) - 1 more bytes, which may belong to a separator that begins before.
    """
    *complete, last = data[:size].split(separator)
    if complete:
        return size - len(last)
    cut = text_cut(data[:size])
    inside = data.find(separator, max(0, cut - len(separator) + 1), cut + len(separator) - 1)
    return cut if inside < 0 or inside >= cut else inside


def divide(text: str, longest: int) -> list[str]:
    """Divide a text into parts of up to `longest` characters: after a line, else after a space, else anywhere."""
    parts, start = [], 0
    while len(text) - start > longest:
        stop = start + longest
        cut = text.rfind("\n", start, stop) + 1 or text.rfind(" ", start + 1, stop) or stop
        cut = cut if cut > start else stop
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]] if parts else [text]
