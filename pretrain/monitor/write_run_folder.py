"""RunFolder: rank 0 appends to run.json, events.jsonl, metrics.jsonl ... of a run folder."""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import read_starts
from pretrain.paths import replace_file


class RunFolder:
    """Appends to the files of a run folder. It is active on rank 0 only; on other ranks it does nothing.

    A file that cannot be written causes one warning, and the run continues: the other ranks do not know of the failure.

    Args:
        before_write: called before each write: it ends the process if this run no longer owns the folder.
        warn: prints a line.
    """

    def __init__(self, path: Path, *, active: bool, before_write: Callable[[], None] = lambda: None,
                 warn: Callable[[str], None] = print) -> None:
        self.path, self._active, self._before_write, self._warn = path, active, before_write, warn
        self._lost_rows: dict[str, int] = {}  # by file, since the last row that was written
        if active:
            with contextlib.suppress(OSError):  # the first row reports it
                path.mkdir(parents=True, exist_ok=True)

    @property
    def is_active(self) -> bool:
        """True if this process writes the files."""
        return self._active

    def start(self, record: dict[str, Any]) -> None:
        """Append a record to run.json, the list of all starts."""
        if not self._active:
            return
        self._before_write()
        path = self.path / "run.json"
        try:
            starts = self._earlier_starts(path) if path.is_file() else []
            text = json.dumps([*starts, record], indent=1, default=str)
            replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        except OSError as error:
            self._warn(f"warning: {path}: this start is not recorded ({error.strerror})")

    def _earlier_starts(self, path: Path) -> list[dict[str, Any]]:
        """Return the records in run.json. If the file is damaged, rename it. Raises OSError."""
        try:
            return read_starts(self.path)
        except ConfigError as error:
            damaged = path.with_name("run.json.damaged")
            os.replace(path, damaged)
            self._warn(f"warning: {error} It is now {damaged}.")
            return []

    def event(self, kind: str, /, *, step: int, reason: str = "", **details: Any) -> None:
        """Append a row to events.jsonl. `kind` is start, resume, save, skip, stop ..."""
        self.append("events.jsonl", {"time": time.time(), "event": kind, "step": step, "reason": reason, **details})

    def metrics(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl. NaN and infinity, which JSON does not have, become null."""
        self.append("metrics.jsonl", {key: None if isinstance(value, float) and not math.isfinite(value) else value
                                       for key, value in row.items()})

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to a file of JSON lines; of an extension: one of `Extension.files`."""
        if not self._active:
            return
        self._before_write()
        path, num_lost = self.path / name, self._lost_rows.pop(name, 0)
        try:
            _append_line(path, json.dumps(row))
        except OSError as error:  # such as a full disk
            self._lost_rows[name] = num_lost + 1
            if num_lost == 0:
                self._warn(f"warning: {path}: rows are lost ({error.strerror}); the run continues")
        else:
            if num_lost > 0:
                self._warn(f"{path} is written again; {num_lost} rows are missing")


def _append_line(path: Path, text: str) -> None:
    """Append a line, or nothing if the disk is full. Begin a new line if a killed run left an incomplete one."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        starts_line = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        data = f"{text}\n" if starts_line else f"\n{text}\n"
        if os.write(descriptor, data.encode()) < len(data.encode()):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
