"""Write files and renames to the disk, so that they survive a crash of the machine."""

import os
from pathlib import Path


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync(path: Path) -> None:
    """Sync a file, or the directory entries of a folder, to disk. Another process may have written them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
