"""Whether a file or folder can be written, tried before hours are spent on what is to be written there."""

import errno
import os
import tempfile
from pathlib import Path

from pretrain.errors import ConfigError, shorten


def check_folder(path: Path, where: str) -> None:
    """Make a folder at the nearest existing place and remove it. Raises ConfigError where `path` cannot be made.

    Permissions alone do not say: root may write everywhere, but not to /proc or a read-only file system.
    """
    path = path.absolute()
    try:
        folder = path
        while not os.path.lexists(folder):  # a link to nowhere is there, and nothing can be made under its name
            folder = folder.parent
        if not folder.is_dir():
            raise ConfigError(where, found=f"{folder}, a file", expected="a folder")
        longest = os.pathconf(folder, "PC_NAME_MAX") - len(".tmp-")
        if any(len(os.fsencode(part)) > longest for part in path.parts[len(folder.parts):]):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.rmdir(tempfile.mkdtemp(prefix=".ds-pretrain-", dir=folder))
    except OSError as error:
        raise ConfigError(where, problem=f"{shorten(str(path))} cannot be written to ({error.strerror or error})",
                          remedy="name a folder that can be made and written to") from None


def check_file(path: Path, where: str) -> None:
    """Raises ConfigError unless `path` is a file that can be written to, or a new one in a folder that exists."""
    try:
        if path.is_dir():
            raise ConfigError(where, found=f"{path}, a folder", expected="a file")
        if not path.absolute().parent.is_dir():
            raise ConfigError(where, problem=f"there is no folder {shorten(str(path.absolute().parent))}",
                              remedy="make it first")
        if path.exists():
            with path.open("a"):
                return
    except OSError as error:
        raise ConfigError(where, problem=f"{shorten(str(path))} cannot be written to ({error.strerror})") from None
    check_folder(path, where)
