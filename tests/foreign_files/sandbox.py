"""Audit hook that records what a process and its children do outside of the folders that they may write.

`install` records in this process. Python processes with `site/` in PYTHONPATH and FOREIGN_SANDBOX in their environment
record from their start on. Connections and processes that are not allowed are prevented, too. The hook sees what Python
opens; `Tree` also finds what C++ has written.
"""

import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "FOREIGN_SANDBOX"  # JSON: log, world, writable, programs
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {"os.mkdir": (0,), "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.symlink": (1,),
          "os.link": (1,), "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,)}
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "", None)
_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")


class Sandbox:
    """Writes a line of JSON to `log` for each thing that is not allowed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.log, self.world = settings["log"], settings["world"]
        self.writable, self.programs = tuple(settings["writable"]), tuple(settings["programs"])
        self._is_busy = False
        self.is_on = True

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_busy or not self.is_on:
            return
        self._is_busy = True
        try:
            self._see(event, args)
        finally:
            self._is_busy = False

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITES and isinstance(args[0], (str, bytes)):
            self._writes(args[0])
        elif event in _PATHS:
            for index in _PATHS[event]:
                if isinstance(args[index], (str, bytes)) and not _has_folder(event, args):
                    self._writes(args[index], is_entry=event != "os.truncate")
        elif event == "subprocess.Popen":
            self._starts(event, [os.fsdecode(word) for word in args[1]])
        elif event in _CODE:
            self._starts(event, [os.fsdecode(word) for word in (args[1] if len(args) > 1 else args[:1])])
        elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
            self._connects(event, args[1][0])
        elif event in ("socket.getaddrinfo", "socket.gethostbyname", "http.client.connect", "ftplib.connect"):
            self._connects(event, args[1] if event.endswith(".connect") else args[0])
        elif event == "exec" and os.fspath(getattr(args[0], "co_filename", "")).startswith(self.world):
            self._record("code", args[0].co_filename)
        elif event == "ctypes.dlopen" and str(args[0]).startswith(self.world):
            self._record("library", str(args[0]))

    def _writes(self, path: str | bytes, *, is_entry: bool = False) -> None:
        """`is_entry`: the path itself, and not what it points to."""
        name = os.path.abspath(os.fsdecode(path))
        real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name)) if is_entry else \
            os.path.realpath(name)
        if not any(f"{real}/".startswith(f"{folder.rstrip('/')}/") for folder in self.writable):
            self._record("write", real)

    def _starts(self, event: str, words: Sequence[str]) -> None:
        text = " ".join(words)
        if not any(text.startswith(program) for program in self.programs):
            self._record("process", f"{event}: {text[:300]}")
            raise PermissionError(errno.EPERM, "not in the sandbox")

    def _connects(self, event: str, host: object) -> None:
        name = os.fsdecode(host) if isinstance(host, (str, bytes)) else host
        if name not in _HERE and name != os.uname().nodename:
            self._record("connection", f"{event}: {name!s:.200}")
            raise OSError(errno.ENETUNREACH, "not in the sandbox")

    def _record(self, kind: str, what: str) -> None:
        with open(self.log, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps([kind, what, sys.argv[:2]]) + "\n")


def _has_folder(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether the paths are relative to an open folder, as those of shutil.rmtree are."""
    number = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2}.get(event)
    return number is not None and len(args) > number and isinstance(args[number], int) and args[number] >= 0


def install() -> Sandbox:
    """Record in this process."""
    sandbox = Sandbox(json.loads(os.environ[VARIABLE]))
    sys.addaudithook(sandbox.hook)
    return sandbox


class Tree:
    """The names, sizes and times of all files below some folders."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._found = self._read()

    def _read(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for folder in self._folders:
            for parent, folders, files in os.walk(folder):
                for name in (*folders, *files):
                    path = os.path.join(parent, name)
                    status = os.lstat(path)
                    found[path] = (status.st_size, status.st_mtime_ns, status.st_mode)
        return found

    def changes(self) -> list[str]:
        """Return the paths that differ from those of the last call."""
        before, self._found = self._found, self._read()
        return sorted({path for path, _ in before.items() ^ self._found.items()})
