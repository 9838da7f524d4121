"""Files of text at URLs, which an extension lists and opens (`Extension.text_inputs`)."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.active_extensions import reader_of
from pretrain.cli import is_url
from pretrain.remote import without_credentials

_LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)
# (path below a folder that a URL names) -> whether the file is no input; it is then listed as a side file
IsLeftOut = Callable[[str], bool]


@dataclass(frozen=True)
class StoredFile:
    """A version of a file at a URL."""

    url: str
    """with the credentials and the signature that open it"""
    size: int
    version: str
    """ETag, hash, or time of the last change; "" if the store names none of them"""
    revision: str = ""
    """commit that `url` names; the content never changes"""
    opener: "Callable[[StoredFile, Path | None], Any] | None" = field(default=None, compare=False, repr=False)
    """see `open`; None: the file is only a record of an earlier start"""

    @property
    def name(self) -> str:
        """The URL, for messages and records."""
        return without_credentials(self.url)

    @property
    def identity(self) -> tuple[str, int, str, str]:
        """Values that are equal for the same version, also if another signature opens it."""
        return self.name, self.size, self.version, self.revision

    def open(self, copy: Path | None = None) -> Any:
        """Open this version: a binary file, with read, seek, tell, close, readable, seekable and closed.

        It may have two more methods. `expect(ranges)`: these ranges of bytes will be read, in their order, so that it
        can fetch them ahead. `check_version()` raises ConfigError if the file at the URL is another one now.

        Args:
            copy: path at which the bytes of a compressed file may be kept for a resume, which reads it from byte 0.
        """
        assert self.opener is not None
        return self.opener(self, copy)


def local_path(word: str) -> str:
    """Return the path of a URL file:///path, and other words unchanged."""
    return _LOCAL.sub("", word) if _LOCAL.match(word) else word


def is_remote(word: str) -> bool:
    """Return whether a word names files that are not local."""
    return is_url(word) and not _LOCAL.match(word)


def stored_files(url: str, commits: dict[str, str], is_left_out: IsLeftOut) -> list[StoredFile]:
    """Return the files that a URL, a URL of a folder or a glob names, in the order of the same local files.

    commits: name of what can move, such as the branch of a repository -> commit. Those that are there are read; others
    are looked up and added. Raises ConfigError, also if no extension reads such URLs.
    """
    _, function = reader_of("text_inputs", url, without_credentials(url))
    return list(function(url, commits, is_left_out))


def stored_file(url: str) -> StoredFile:
    """Return the only file that a URL names. Raises ConfigError."""
    [file] = stored_files(url, {}, lambda _: False)
    return file


def expect(file: Any, ranges: Iterable[tuple[int, int]]) -> None:
    """Let a file fetch ranges of bytes ahead, if it can."""
    if hasattr(file, "expect"):
        file.expect(ranges)


def check_version(file: Any) -> None:
    """Raise ConfigError if the file at the URL is another one now than the open one, if this can be found out."""
    if hasattr(file, "check_version"):
        file.check_version()
