"""Verify that a checkpoint holds what was written (every file against its hash), and that it can be loaded."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pretrain.checkpoint.format.files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import Manifest, files_in
from pretrain.checkpoint.format.pickle_scan import has_only_usual_globals
from pretrain.errors import ConfigError

_THREADS = 4  # hashing runs outside Python's lock; more than this a disk seldom feeds

Advance = Callable[[int, str], None]  # bytes done since the last call, of which file


def find_damage(folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *,
           advance: Advance | None = None) -> list[str]:
    """What is wrong, a line a file: `FILE: found ...; expected ...`. Of all files and foreign ones, or of `names` only.

    `advance` is called after each file, from this thread.
    """
    checked = sorted(manifest.files if names is None else names)
    complaints = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        findings = pool.map(partial(_finding, folder.resolve()), checked, [manifest.files[name] for name in checked])
        for name, finding in zip(checked, findings, strict=True):
            if finding is not None:
                complaints.append(f"{folder / name}: {finding}")
            if advance is not None:
                advance(manifest.files[name].bytes, name)
    return complaints + (unexpected_files(folder, manifest) if names is None else [])


def unexpected_files(folder: Path, manifest: Manifest) -> list[str]:
    """A line for each file that the manifest does not name: DeepSpeed looks for some of its files by pattern."""
    names = sorted(set(files_in(folder)) - manifest.files.keys())
    return [f"{folder / name}: found a foreign file; expected none" for name in names]


def unloadable_files(folder: Path, manifest: Manifest) -> list[str]:
    """A line for each file with pickled data that a resume, `convert` or `consolidate` would reject.

    No tensors are read, and torch is imported only for a file with unusual classes.
    """
    complaints = []
    for name in sorted(name for name in manifest.files if name.endswith(".pt")):
        if not has_only_usual_globals(folder / name):
            from pretrain.checkpoint.format.pickles import load_pickle

            try:
                load_pickle(folder / name, mmap=True)
            except ConfigError as error:
                complaints.append(str(error))
    return complaints


def _finding(folder: Path, name: str, record: FileRecord) -> str | None:
    path = folder / name
    try:
        if path.resolve() != path:
            return f"found a link to {path.resolve()}; expected a file of this folder"
        if not path.is_file():
            return f"found no such file; expected {record.bytes} bytes"
        size = path.stat().st_size
        if size != record.bytes:
            return f"found {size} bytes; expected {record.bytes} bytes"
        sha256 = sha256_of(path)
    except (OSError, RuntimeError) as error:  # an unreadable sector; links in a circle
        return f"found an unreadable file ({getattr(error, 'strerror', None) or error}); expected {record.bytes} bytes"
    return None if sha256 == record.sha256 else f"found SHA-256 {sha256[:16]}...; expected {record.sha256[:16]}..."


def files_of_rank(names_with_sizes: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """The files that `rank` verifies: each file falls to one rank, and the ranks' bytes are about the same."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for name in sorted(names_with_sizes, key=lambda name: (-names_with_sizes[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += names_with_sizes[name] + 1  # so that empty files are spread too
    return shares[rank]
