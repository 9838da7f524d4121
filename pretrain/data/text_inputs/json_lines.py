"""Find the text in a JSON line, also in one that is too long to be parsed at once.

A long line is read by the code below, because no library reads a part of a string: for a text of 300 MB, ijson 3.6
takes 815 MiB and orjson 836 MiB. This code takes 10 MiB, and its messages name the byte.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.data.text_inputs.text import check_nul, check_unicode, parse_json
from pretrain.errors import ConfigError


def text_of_json_line(line: bytes, where: str, jsonl_key: str) -> str:
    """Return the text at `jsonl_key` of a JSON object. Raises ConfigError that begins with `where`.

    `jsonl_key` "a.b" is key b of the object at key a, unless there is a key of that name.
    """
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_json(where, f"0x{line[error.start]:02X} is not valid UTF-8 at byte {error.start + 1} of the line"
                       ) from None
    except (ValueError, RecursionError) as error:
        raise not_json(where, str(error)) from None
    if not isinstance(value, dict):
        raise ConfigError(where, found=f"a JSON {type(value).__name__}", expected="one JSON object per line")
    text = _value_at(value, jsonl_key)
    if not isinstance(text, str):
        raise no_text_error(where, jsonl_key, value)
    if b"\\u" in line:
        check_unicode(text, where)
        check_nul(text, where)
    return text


def not_json(where: str, problem: str) -> ConfigError:
    """Return the error for a line that is not valid JSON."""
    return ConfigError(where, problem=f"it is not valid JSON: {problem}", remedy="write one JSON object per line")


def _value_at(value: dict[str, Any], key: str) -> object:
    if key in value or "." not in key:
        return value.get(key)
    found: object = value
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def no_text_error(where: str, key: str, value: dict[str, Any]) -> ConfigError:
    """Return the error for a JSON object without a string at `key`."""
    found = _value_at(value, key)
    keys = ", ".join(list(value)[:8]) or "no keys"
    name_key = f"name the key of the text with --jsonl_key; this object has {keys}"
    if key not in value and found is None:
        return ConfigError(where, problem=f"the JSON object has no key {key!r}", word=key, known=value, remedy=name_key)
    problem = "null" if found is None else f"a JSON {type(found).__name__}, not a string"
    remedy = "correct or remove this line" + (f", or {name_key}" if len(value) > 1 else "")
    return ConfigError(where, problem=f"the value of {key!r} is {problem}", remedy=remedy)


PART_BYTES = 1 << 19
_LONGEST_TOKEN = 1 << 16  # bytes of a key or a number
_DEEPEST = 500
_SPACE = re.compile(rb"[ \t\r]*")
_NUMBER = rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_SCALAR = re.compile(_NUMBER + rb"|true|false|null|NaN|-?Infinity")
_NUMBERS_OF_LIST = re.compile(rb"(?:" + _NUMBER + rb"[ \t]*,[ \t]*)+")
_CHARACTERS = re.compile(
    rb'(?:[^\\]+|\\(?:["\\/bfnrt]|u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*")
"""complete characters of a JSON string; a pair of surrogates is one character"""


class LongLine:
    """The bytes of one line, which are read in blocks. `ahead` are the bytes that have been read already."""

    def __init__(self, ahead: bytes, read_block: Callable[[], bytes], where: str) -> None:
        self.where = where
        self.size = 0
        """bytes of the line so far, and of its newline"""
        self._size_of_line = 0  # so far, without the newline
        self._read_block = read_block
        self._data = b""
        self._at = 0
        self._ended = False
        self._after = b""
        self._add(ahead)

    def _add(self, block: bytes) -> None:
        end = block.find(b"\n")
        self._ended = end >= 0 or not block
        if end >= 0:
            block, self._after = block[:end], block[end + 1:]
        self._size_of_line += len(block)
        self.size = self._size_of_line + (end >= 0)
        self._data, self._at = self._data[self._at:] + block, 0

    def error(self, problem: str) -> ConfigError:
        """Return the error for a problem at the current byte."""
        byte = self._size_of_line - len(self._data) + self._at + 1
        return not_json(self.where, f"{problem} at byte {byte} of the line")

    def skip_to_end(self) -> bytes:
        """Read to the end of the line. Return the bytes that have been read after it."""
        while not self._ended:
            self._at = len(self._data)
            self._add(self._read_block())
        return self._after

    def ahead(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end of the line, without consuming them."""
        while len(self._data) - self._at < size and not self._ended:
            self._add(self._read_block())
        return self._data[self._at : self._at + size]

    def next_byte(self) -> bytes:
        """Consume whitespace. Return the byte after it without consuming it; b"" at the end of the line."""
        while True:
            space = _SPACE.match(self._data, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._data) or self._ended:
                return self._data[self._at : self._at + 1]
            self._add(self._read_block())

    def advance(self, size: int) -> None:
        """Consume bytes that `ahead` or `next_byte` have returned."""
        self._at += size

    def match(self, pattern: "re.Pattern[bytes]") -> bytes:
        """Consume and return what matches the pattern; b"" if nothing does."""
        self.ahead(_LONGEST_TOKEN)
        found = pattern.match(self._data, self._at, self._at + _LONGEST_TOKEN)
        if found is None:
            return b""
        self._at = found.end()
        return found[0]

    def string_parts(self) -> Iterator[str]:
        """Consume a string, and yield it in parts. The next byte is its first quote."""
        self.advance(1)
        ends = False
        while not ends:
            block = self.ahead(PART_BYTES)
            quote = _closing_quote(block)
            ends = quote >= 0
            if not ends and len(block) < PART_BYTES:
                raise self.error("Unterminated string")
            size = quote if ends else _part_cut(block)
            yield self._decode(block[:size])
            self.advance(size + ends)

    def _decode(self, part: bytes) -> str:
        try:
            text: str = json.loads(f'"{part.decode()}"')
        except UnicodeDecodeError as error:
            self.advance(error.start)
            raise self.error(f"0x{part[error.start]:02X} is not valid UTF-8") from None
        except json.JSONDecodeError as error:
            self.advance(len(part.decode()[: max(error.pos - 1, 0)].encode()))
            raise self.error(error.msg.removesuffix(" at")) from None
        return text


def _closing_quote(block: bytes) -> int:
    """Return the position of the first quote that no backslash escapes, or -1."""
    quote = block.find(b'"')
    while quote >= 0 and _is_escaped(block, quote):
        quote = block.find(b'"', quote + 1)
    return quote


def _is_escaped(block: bytes, position: int) -> bool:
    first = position
    while first > 0 and block[first - 1] == ord("\\"):
        first -= 1
    return (position - first) % 2 == 1


def _part_cut(block: bytes) -> int:
    """Return where to split a part of a JSON string: after a line, before a space, or between two characters."""
    newline = block.rfind(rb"\n")
    if newline >= 0 and not _is_escaped(block, newline):
        return newline + 2
    space = block.rfind(b" ")
    if space > 0:
        return space
    characters = _CHARACTERS.match(block)
    assert characters is not None
    cut = characters.end()
    if cut and block[cut - 1] >= 0x80:  # the end may be inside a UTF-8 character
        cut -= 1
        while cut > 0 and block[cut] & 0xC0 == 0x80:
            cut -= 1
    return cut or len(block)


def text_parts(line: LongLine, jsonl_key: str) -> Iterator[str]:
    """Yield the text at `jsonl_key` of the JSON object in a line, in parts. All other values are read and dropped.

    Raises ConfigError after the parts before the error. A second text at `jsonl_key` is an error here, although
    json.loads takes the last one: the parts of the first one have been used.
    """
    if line.ahead(3) == b"\xef\xbb\xbf":
        line.advance(3)
    if line.next_byte() != b"{":
        raise ConfigError(line.where, found="another value", expected="one JSON object per line")
    scanner = _Scanner(line, jsonl_key)
    for part in scanner.value(()):
        check_unicode(part, line.where)
        check_nul(part, line.where)
        yield part
    if line.next_byte():
        raise line.error("Extra data")
    if not scanner.found:
        raise no_text_error(line.where, jsonl_key, scanner.values)


class _Scanner:
    """Reads the values of a JSON object, and remembers what was found in it."""

    def __init__(self, line: LongLine, jsonl_key: str) -> None:
        self.line = line
        self.found: tuple[str | None, ...] = ()
        """the keys that lead to the text that was found"""
        self.values: dict[str, Any] = {}
        """an example value of the type at each key of the outermost object"""
        self._plain, self._nested = (jsonl_key,), tuple(jsonl_key.split("."))

    def value(self, path: tuple[str | None, ...]) -> Iterator[str]:
        """Read the value to which these keys lead (None: an element of a list). Yield the parts of the text in it."""
        byte = self.line.next_byte()
        if byte == b'"':
            yield from self._string(path)
            return
        if byte not in (b"{", b"["):
            self._scalar(path)
            return
        is_object, end = (True, b"}") if byte == b"{" else (False, b"]")
        self._remember(path, {} if is_object else [])
        if len(path) >= _DEEPEST:
            raise self.line.error(f"More than {_DEEPEST} levels")
        self.line.advance(1)
        has_more = self.line.next_byte() != end
        while has_more:
            if not is_object:
                self.line.next_byte()
                self.line.match(_NUMBERS_OF_LIST)
            yield from self.value((*path, self._key() if is_object else None))
            has_more = self.line.next_byte() == b","
            if has_more:
                self.line.advance(1)
        if self.line.next_byte() != end:
            raise self.line.error("Expecting ',' delimiter")
        self.line.advance(1)

    def _scalar(self, path: tuple[str | None, ...]) -> None:
        scalar = self.line.match(_SCALAR)
        if not scalar:
            raise self.line.error("Expecting value")
        self._remember(path, None if scalar == b"null" else scalar in (b"true", b"false") or 0)

    def _key(self) -> str:
        if self.line.next_byte() != b'"':
            raise self.line.error("Expecting property name enclosed in double quotes")
        name = ""
        for part in self.line.string_parts():
            name += part
            if len(name) > _LONGEST_TOKEN:
                raise self.line.error("Key is too long")
        if self.line.next_byte() != b":":
            raise self.line.error("Expecting ':' delimiter")
        self.line.advance(1)
        return name

    def _remember(self, path: tuple[str | None, ...], value: object) -> None:
        if len(path) == 1 and path[0] is not None and len(self.values) < 1000:
            self.values[path[0]] = value

    def _string(self, path: tuple[str | None, ...]) -> Iterator[str]:
        self._remember(path, "")
        is_text = path == self._plain or (path == self._nested and self.found != self._plain)
        if is_text and self.found:
            raise self.line.error("A second text at the key")
        if is_text:
            self.found = path
        for part in self.line.string_parts():
            if is_text and part:
                yield part
