"""Verify that a checkpoint's files have the sizes and hashes of its manifest, and that its pickles can be loaded.

Pickles are scanned without torch and without reading tensors.
"""

import contextlib
import heapq
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pretrain.checkpoint.format.hashed_files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import files_in
from pretrain.errors import ConfigError
from pretrain.progress import ProgressBar

_THREADS = 4  # hashing releases Python's GIL; few disks are fast enough for more threads
_CRC_BYTES = 2**22  # that are read at a time to check a CRC-32

Advance = Callable[[int, str], None]  # signature of ProgressBar.advance: bytes since the last call, file name
_STORAGES = ("BFloat16", "Bool", "Byte", "Double", "Float", "Half", "Int", "Long", "Short")
# classes and functions that checkpoints usually need; `pickles.load_pickle` accepts all of these and a few others
USUAL_GLOBALS = frozenset({
    "collections OrderedDict", "torch Size", "torch._utils _rebuild_tensor_v2",
    *(f"torch {name}Storage" for name in _STORAGES),
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler", "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.runtime.zero.config ZeroStageEnum", "deepspeed.utils.tensor_fragment fragment_address"})
_OTHER_IMPORTS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")  # import opcodes that torch.save never writes


def damage_of(folder: Path, manifest: Manifest, advance: Advance | None = None) -> list[str]:
    """Read every file of a checkpoint and return one line for each problem.

    Pickles are scanned for unusual classes only if all sizes and hashes are right.
    """
    return find_damage(folder, manifest, advance=advance) or unloadable_files(folder, manifest)


def reject_damaged(folder: Path, manifest: Manifest) -> None:
    """Read every file of a checkpoint. Raises ConfigError if one is damaged, or if it would not be loaded."""
    with ProgressBar(f"verifying {folder.name}", manifest.num_bytes) as progress:
        problems = damage_of(folder, manifest, progress.advance)
    if problems:
        raise damaged_checkpoint(folder, problems)


def damaged_checkpoint(folder: Path, problems: list[str]) -> ConfigError:
    """Return the error for a checkpoint with these problems. Its message has the first one."""
    return ConfigError(str(folder), problem=f"the checkpoint is damaged: {problems[0].rstrip('.')}",
                       remedy="use another checkpoint")


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
        # `resolve` asks for each folder of the path
        if os.path.islink(path) or (path.parent != folder and path.resolve() != path):
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
    loads = [(0, each) for each in range(world_size)]  # bytes of each rank, as a heap
    for name in sorted(names_with_sizes, key=lambda name: (-names_with_sizes[name], name)):
        load, least_loaded = loads[0]
        names_by_rank[least_loaded].append(name)
        heapq.heapreplace(loads, (load + names_with_sizes[name] + 1, least_loaded))  # + 1: spread empty files, too
    return names_by_rank[rank]


def has_only_usual_globals(path: Path) -> bool:
    """Return whether the file is in torch.save's zip format and needs only USUAL_GLOBALS."""
    with contextlib.suppress(OSError, ValueError, struct.error, zipfile.BadZipFile):
        return pickle_globals(path) <= USUAL_GLOBALS
    return False


def pickle_globals(path: Path) -> set[str]:
    """Return "MODULE NAME" of each class and function that the file's pickle imports.

    For import opcodes that torch.save does not write, the set has the opcode's name instead. Raises OSError,
    ValueError, struct.error or BadZipFile if the file is not in torch.save's zip format.
    """
    found = set()
    for opcode, argument, _ in pickletools.genops(_data_pkl(path)):
        if opcode.name == "GLOBAL":
            found.add(str(argument))
        elif opcode.name in _OTHER_IMPORTS:
            found.add(opcode.name)
    return found


def _data_pkl(path: Path) -> bytes:
    """Read the archive's pickle, which is stored uncompressed.

    ZipFile.read cannot be used, because it checks a CRC-32 that `FileEngine` does not write.
    """
    with open(path, "rb") as file:
        with zipfile.ZipFile(file) as archive:
            (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        file.seek(entry.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        file.seek(name_length + extra_length, 1)
        return file.read(entry.file_size)


def damaged_entry(path: Path) -> str | None:
    """Return the first part of a `torch.save` file that has not its recorded CRC-32; None: there is none.

    torch itself does not check them, and records 0 after `torch.serialization.set_crc32_options(False)` (torch 2.13).
    """
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            try:
                with archive.open(entry) as part:
                    while entry.CRC and part.read(_CRC_BYTES):
                        pass
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError):
                return entry.filename
    return None
