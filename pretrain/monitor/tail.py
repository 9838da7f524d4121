"""Tail: the rows of a .jsonl file that grows, from where the last call ended."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 8 * 2**20


@dataclass
class Tail:
    """Reads the complete lines of a file that grows. After a replacement or a cut it begins again."""

    path: Path
    offset: int = 0
    inode: int | None = None
    lines: int = 0  # number of lines read

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
        with open(self.path, "rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset)
            while block := file.readlines(_BLOCK_BYTES):
                rows = _parse(block)
                if rows[-1] is None and not block[-1].endswith(b"\n"):  # incomplete: the rest may follow
                    rows.pop()
                    block.pop()
                first, self.lines = self.lines, self.lines + len(rows)
                self.offset += sum(map(len, block))
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
