"""Tail: the rows of a .jsonl file that grows, from where the last call ended."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.stored_json import read_lines


@dataclass
class Tail:
    """Reads the complete lines of a file that grows. After a replacement or a cut it begins again."""

    path: Path
    offset: int = 0
    inode: int | None = None
    lines: int = 0  # number of lines read
    _is_open: bool = False  # the last one had no end when it was read

    def was_replaced(self) -> bool:
        """Return whether the file is another one than the one that was read, or shorter."""
        try:
            status = os.stat(self.path)
        except OSError:
            return self.offset > 0
        return self.offset > 0 and (status.st_size < self.offset or status.st_ino != self.inode)

    def rows(self) -> list[dict[str, Any]]:
        """Return all new rows; those until an error of the file system."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            for block in self.blocks():
                found += [row for _, row in block]
        return found

    def blocks(self) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Yield lists of (number of the line, row). Lines that are not JSON objects are skipped."""
        if not self.path.is_file():
            return
        self.inode = os.stat(self.path).st_ino
        for lines, offset in read_lines(self.path, self.offset):
            if self._is_open and not lines[0]:
                del lines[0]
            rows, self._is_open = _parse(lines), bool(lines) and offset == self.offset
            if self._is_open:  # the last line has no end
                if rows[0] is None:  # incomplete: the rest may follow
                    self._is_open = False
                    return
                offset += len(lines[0])
            first, self.lines, self.offset = self.lines, self.lines + len(rows), offset
            yield [(line, row) for line, row in enumerate(rows, first) if row is not None]


def _parse(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the row of each line; None for a line that is not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # one call is twice as fast as one call per line
        if len(rows) == len(lines) and set(map(type, rows)) == {dict}:
            return rows
    return [parse_row(line) for line in lines]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None for a line that is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
