"""Verify that a checkpoint's files have the sizes and hashes of its manifest, and that its pickles can be loaded."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pretrain.checkpoint.format.files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import Manifest, files_in
from pretrain.checkpoint.format.pickle_scan import has_only_usual_globals
from pretrain.errors import ConfigError

_THREADS = 4  # hashing releases Python's GIL; few disks are fast enough for more threads

Advance = Callable[[int, str], None]  # signature of ProgressBar.advance: bytes since the last call, file name


def find_damage(folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *,
                advance: Advance | None = None) -> list[str]:
    """Hash the files and return one line for each problem: `FILE: found ...; expected ...`.

    Args:
        names: the files to hash. None: all files; then files that the manifest does not name are also reported.
        advance: called after each file, in the calling thread.
    """
    # the largest file first, because one thread hashes it alone: SHA-256 of a file cannot be divided
    checked = sorted(manifest.files if names is None else names, key=lambda name: (-manifest.files[name].bytes, name))
    problems = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        records = [manifest.files[name] for name in checked]
        results = pool.map(partial(_file_problem, folder.resolve()), checked, records)
        for name, problem in zip(checked, results, strict=True):
            if problem is not None:
                problems.append(f"{folder / name}: {problem}")
            if advance is not None:
                advance(manifest.files[name].bytes, name)
    return sorted(problems) + (unexpected_files(folder, manifest) if names is None else [])


def unexpected_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return one line for each file that the manifest does not name.

    Such a file is a problem, because DeepSpeed finds some files by a name pattern and would load it.
    """
    names = sorted(set(files_in(folder)) - manifest.files.keys())
    return [f"{folder / name}: the manifest does not name this file; remove it" for name in names]


def unloadable_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return one line for each pickle that a resume, `convert` or `consolidate` would reject.

    No tensors are read. torch is imported only for files that need unusual classes.
    """
    problems = []
    for name in sorted(name for name in manifest.files if name.endswith(".pt")):
        if not has_only_usual_globals(folder / name):
            from pretrain.checkpoint.format.pickles import load_pickle

            try:
                load_pickle(folder / name, mmap=True)
            except ConfigError as error:
                problems.append(str(error))
    return problems


def _file_problem(folder: Path, name: str, record: FileRecord) -> str | None:
    path = folder / name
    try:
        if path.resolve() != path:
            return f"found a link to {path.resolve()}; expected a regular file"
        if not path.is_file():
            return f"found no such file; expected {record.bytes} bytes"
        size = path.stat().st_size
        if size != record.bytes:
            return f"found {size} bytes; expected {record.bytes} bytes"
        sha256 = sha256_of(path)
    except (OSError, RuntimeError) as error:  # OSError: a bad sector; RuntimeError: a cycle of symbolic links
        return f"found an unreadable file ({getattr(error, 'strerror', None) or error}); expected {record.bytes} bytes"
    return None if sha256 == record.sha256 else f"found SHA-256 {sha256[:16]}...; expected {record.sha256[:16]}..."


def files_of_rank(names_with_sizes: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """Return the files that `rank` processes. Each file has one rank, and the ranks have similar total sizes."""
    names_by_rank: list[list[str]] = [[] for _ in range(world_size)]
    loads = [0] * world_size  # bytes
    for name in sorted(names_with_sizes, key=lambda name: (-names_with_sizes[name], name)):
        least_loaded = loads.index(min(loads))
        names_by_rank[least_loaded].append(name)
        loads[least_loaded] += names_with_sizes[name] + 1  # + 1, so that empty files are spread too
    return names_by_rank[rank]
