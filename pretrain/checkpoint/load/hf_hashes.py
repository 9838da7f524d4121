"""Hash the weights files of a transformers folder, and compare them with recorded hashes. Imports no torch."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from pretrain.checkpoint.format.files import FileRecord, sha256_of
from pretrain.checkpoint.load.hf_folder import HFFolder
from pretrain.errors import ConfigError
from pretrain.stored_json import build, read_json
from pretrain.terminal.progress import ProgressBar


class _Source(TypedDict):
    files: dict[str, FileRecord]


_SHA256 = re.compile(r"[0-9a-f]{64}")


def expected_hashes(folder: Path, files: tuple[str, ...]) -> dict[str, str]:
    """Return the SHA-256 of those files whose hash is recorded.

    An exported folder records them in source.json. In the Hub's cache, a file is a link to a blob, and the name of a
    large file's blob is its SHA-256.
    """
    recorded: dict[str, str] = {}
    for file in files:
        path = folder / file
        if path.is_symlink() and _SHA256.fullmatch(path.resolve().name):
            recorded[file] = path.resolve().name
    try:
        source = build(_Source, read_json(folder / "source.json"))
        recorded |= {file: source["files"][file].sha256 for file in files if file in source["files"]}
    except (OSError, ValueError):
        pass  # the folder was not written by this program
    return recorded


def verify_recorded_hashes(found: HFFolder) -> None:
    """Read the files whose hashes are recorded. Raises ConfigError for a damaged one."""
    recorded = replace(found, files=tuple(expected_hashes(found.folder, found.files)))
    with ProgressBar(f"verifying {found.folder.name}", sum(map(found.bytes_of, recorded.files))) as progress:
        hash_files(recorded, progress.advance)


def hash_files(found: HFFolder, advance: Callable[[int, str], None] | None = None) -> dict[str, FileRecord]:
    """Return size and SHA-256 of each weights file. Raises ConfigError if one differs from its recorded hash."""
    recorded, result = expected_hashes(found.folder, found.files), {}
    for file in found.files:
        path = found.folder / file
        try:
            record = FileRecord(path.stat().st_size, sha256_of(path))
        except OSError as error:
            raise ConfigError(str(path), problem=f"it cannot be read: {error.strerror or error}") from None
        if record.sha256 != recorded.get(file, record.sha256):
            raise ConfigError(str(path), found=f"SHA-256 {record.sha256[:16]}...",
                              expected=f"{recorded[file][:16]}..., as recorded when it was written",
                              remedy="download or write the file again")
        result[file] = record
        if advance is not None:
            advance(record.bytes, file)
    return result
