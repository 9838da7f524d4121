"""Read text files of bounded size, and check JSON that this program wrote earlier against the types of its content.

Such a file may have been damaged or replaced since. The functions raise OSError if it cannot be read and ValueError if
its content is wrong, whatever the file is: a FIFO, a device, very large, nested deeply, full of holes.
"""

import contextlib
import dataclasses
import errno
import json
import os
import stat
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pretrain.errors import shorten

LARGEST_BYTES = 2**28  # 10 TB of tokens need 40 MB of hashes; the shard index of a rank is smaller
LARGEST_SETTINGS_BYTES = 2**22  # size of a file that people write; the YAML parser needs a minute for so much
_LONGEST_LINE_BYTES = 2**26  # a line of a .jsonl file; rows have some kB
_BLOCK_BYTES = 8 * 2**20
_DEEPEST = 60  # levels; json.dumps and json.loads fail at about 1,000
_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"), int: ((int,), "a whole number"), float: ((int, float), "a number"),
    str: ((str,), "a string"), type(None): ((type(None),), "null"), dict: ((dict,), "an object"),
    list: ((list,), "a list")}
_T = TypeVar("_T")


@contextlib.contextmanager
def open_regular(path: Path, mode: str = "rb", *, largest_bytes: int = LARGEST_BYTES) -> Iterator[BinaryIO]:
    """Open a regular file. Raises OSError, also for other kinds of files and for too large ones. Never waits."""
    flags = os.O_RDWR if "+" in mode else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK, a FIFO waits for a writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > largest_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, and at most {largest_bytes:,} are read",
                          str(path))
        with open(descriptor, mode, closefd=False) as file:
            yield typing.cast(BinaryIO, file)
    finally:
        os.close(descriptor)


def read_text(path: Path, *, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the content of a regular file. Raises OSError, and ValueError if it is not UTF-8."""
    with open_regular(path, largest_bytes=largest_bytes) as file:
        return file.read().decode()


def read_settings(path: str | Path) -> str:
    """Return the content of a text file that people write: YAML, JSON, a hostfile.

    It may be a device, or a pipe of the shell (`--config <(...)`), but no FIFO in a folder, which may have no writer.
    Raises OSError, also for more than LARGEST_SETTINGS_BYTES, and ValueError if it is not UTF-8.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not str(path).startswith(("/dev/", "/proc/")):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        os.set_blocking(file.fileno(), True)
        content = file.read(LARGEST_SETTINGS_BYTES + 1)
    if len(content) > LARGEST_SETTINGS_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST_SETTINGS_BYTES:,} bytes", str(path))
    return content.decode("utf-8-sig")


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[list[bytes], int]]:
    """Yield the lines of a regular file from a position on, in blocks: (lines without their ends, position after them).

    An incomplete last line comes alone, with the position at its beginning. A line that has a hole or is longer than
    _LONGEST_LINE_BYTES is empty. So the time does not depend on holes, of which a file of 1 TB may consist, and
    memory depends on the block alone. Raises OSError.
    """
    with open_regular(path, largest_bytes=sys.maxsize) as file:
        yield from _blocks_of_lines(file.fileno(), offset)


def _blocks_of_lines(descriptor: int, position: int) -> Iterator[tuple[list[bytes], int]]:
    rest, is_skipped = b"", False  # the beginning of a line; whether its rest is skipped
    while True:
        begin = _next_data(descriptor, position)
        block = b"" if begin is None else os.pread(descriptor, _BLOCK_BYTES, begin)
        if begin is None or not block:
            break
        is_skipped = is_skipped or begin > position
        position = begin + len(block)
        first, newline, block = block.partition(b"\n")
        if not newline:
            rest += b"" if is_skipped else first
            is_skipped = is_skipped or len(rest) > _LONGEST_LINE_BYTES
            continue
        *lines, rest_of_block = block.split(b"\n")
        yield [b"" if is_skipped else rest + first, *lines], position - len(rest_of_block)
        rest, is_skipped = rest_of_block, False
    if rest and not is_skipped:
        yield [rest], position - len(rest)


def _next_data(descriptor: int, position: int) -> int | None:
    """Return the first position from `position` on that is not in a hole; None at the end of the file."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        return position  # a file system without this call


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises OSError and ValueError."""
    return parse_json(read_text(path))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, and ValueError for other content."""
    return build(dict[str, Any], read_json(path))


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value. Raises ValueError for invalid JSON, a repeated key, and deep nesting."""
    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [child for each in level if isinstance(each, (dict, list))
                 for child in (each.values() if isinstance(each, dict) else each) if isinstance(child, (dict, list))]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from a JSON object. Raises ValueError if a key is repeated."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = min(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f'it has the key "{shorten(twice)}" twice')
    return result


def build(kind: type[_T], value: Any, where: str = "") -> _T:
    """Return a JSON value as a value of the type `kind`. Raises ValueError, which names the part that is wrong.

    `kind` is a dataclass (also a generic one, with its arguments), a TypedDict, or a type made of these, scalars, dict,
    list, tuple, | and Any. A dataclass takes no unknown keys, a TypedDict ignores them. `Annotated[X, Y]` is an X with
    the content of a Y. The keys of a dict[int, X] are numbers that JSON has as strings.
    """
    return typing.cast(_T, _build(kind, value, where))


def check_fields(kind: type, values: dict[str, Any], where: str = "") -> None:
    """Raise ValueError unless the values have the types of the fields of a dataclass. Unknown keys are ignored."""
    hints, _ = _fields_of(kind)
    for key in values.keys() & hints.keys():
        _build(hints[key], values[key], _join(where, key))


def _build(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return value
    if origin is Annotated:
        for content in args[1:]:
            _build(content, value, where)
        return _build(args[0], value, where)
    if origin in (typing.Union, types.UnionType):
        return _build_union(args, value, where)
    if dataclasses.is_dataclass(origin or kind) or typing.is_typeddict(kind):
        return _build_fields(kind, _check(dict, value, where), where)
    if origin is dict:
        return {_key(args[0], key, where): _build(args[1], each, _join(where, key))
                for key, each in _check(dict, value, where).items()}
    if origin in (list, tuple):
        values = _check(list, value, where)
        kinds = args if origin is tuple and args[-1] is not ... else args[:1] * len(values)
        if len(kinds) != len(values):
            raise ValueError(f"{where or 'it'} has {len(values)} items instead of {len(kinds)}")
        return origin(_build(each, values[at], f"{where}[{at}]") for at, each in enumerate(kinds))
    return _check(type(None) if kind is None else kind, value, where)


def _key(kind: Any, key: Any, where: str) -> Any:
    if kind is not int:
        return _build(kind, key, where)
    if type(key) is int:  # YAML has such keys
        return key
    if not isinstance(key, str) or not key.isascii() or not key.isdecimal() or len(key) > 18:
        raise ValueError(f"{_join(where, str(key))} is not a whole number")
    return int(key)


def _build_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return the value as the first type that it has. Raises the error of that with the value's own JSON type."""
    errors = []
    for kind in kinds:
        try:
            return _build(kind, value, where)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(max(errors, key=len) if isinstance(value, (dict, list)) else errors[0])


def _build_fields(kind: Any, values: dict[str, Any], where: str) -> Any:
    hints, required = _fields_of(kind)
    for key in sorted(required - values.keys()):
        raise ValueError(f"{_join(where, key)} is missing")
    known = {key: _build(hints[key], value, _join(where, key)) for key, value in values.items() if key in hints}
    if typing.is_typeddict(kind):
        return {**values, **known}
    for key in sorted(values.keys() - hints.keys()):
        raise ValueError(f"{_join(where, shorten(key))} is not a key of it")
    return kind(**known)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the type of each field, and the names of those without a default."""
    origin = typing.get_origin(kind) or kind
    hints = typing.get_type_hints(origin, include_extras=True)
    if typing.is_typeddict(kind):
        return hints, frozenset(kind.__required_keys__)
    bound = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(kind), strict=False))
    for name, hint in hints.items() if bound else ():
        open_types = getattr(hint, "__parameters__", ())
        hints[name] = bound[hint] if hint in bound else hint[tuple(map(bound.get, open_types))] if open_types else hint
    fields = {f.name: f for f in dataclasses.fields(origin)}
    return {name: hints[name] for name in fields}, frozenset(
        name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING)


def _check(kind: Any, value: Any, where: str) -> Any:
    accepted, expected = _SCALARS[kind]
    is_bool = isinstance(value, bool) and bool not in accepted
    if not isinstance(value, accepted) or is_bool or (isinstance(value, int) and not -2**63 <= value < 2**64):
        raise ValueError(f"{where or 'it'} is {shorten(json.dumps(value), 60)} instead of {expected}")
    return value


def _join(where: str, key: str | int) -> str:
    return f"{where}.{shorten(str(key), 60)}" if where else shorten(str(key), 60)
