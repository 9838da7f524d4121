"""The checkpoints of a run: which are complete, which one is the newest good one, and the file `latest`. No torch.

A checkpoint is complete if its manifest is intact, every file that the manifest names has the recorded size, and the
step in the folder's name is the manifest's. It is good unless the manifest says that it holds NaN or infinity. The
files themselves are not read; `verify.find_damage` compares their hashes.

A rank's background writer locks a file in the folder while it works: a start waits for it.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from pretrain.checkpoint.format.manifest import MANIFEST, NOT_FINITE, Manifest
from pretrain.errors import ConfigError, SaveError, counted, file_errors, printable, reason_of, shorten
from pretrain.paths import for_each_file, lock, status_of
from pretrain.stored_json import open_regular, parse_json, read_text

ReadManifest = Callable[[Path], Manifest]  # raises ConfigError
LATEST_FILE = "latest"  # in the checkpoints folder: the name of the newest checkpoint, for plain DeepSpeed
_FOLDER_NAME = re.compile(r"global_step(\d+)")
_FILES = '\n "files": '  # begins the last but one key of the text; at the top level, the indentation is 1
_HEAD_BYTES = 2**13  # that are read at a time
_POLL_S = 0.1


def files_in(folder: Path) -> list[str]:
    """List the relative paths of all files below the folder, sorted, without the manifest. Links count as files."""
    found: list[str] = []
    for around, folders, names in os.walk(folder):  # `Path.rglob` asks for the kind of each file once more
        links = [name for name in folders if os.path.islink(os.path.join(around, name))]
        found += [os.path.relpath(os.path.join(around, name), folder) for name in [*names, *links]]
    return sorted(name for name in found if name != MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and compare the sizes of its files, but not their contents.

    Raises ConfigError if the manifest cannot be read or is damaged, if the folder's name has another step than the
    manifest, or if a file is missing or has a wrong size.
    """
    manifest = parse_manifest(folder)
    sizes = for_each_file(lambda name: _size(folder / name), list(manifest.files))
    for (name, record), found_bytes in zip(manifest.files.items(), sizes, strict=True):
        if found_bytes != record.bytes:
            raise ConfigError(str(folder / name), found="no such file" if found_bytes is None else
                              f"{found_bytes} bytes", expected=f"{record.bytes} bytes", remedy="use another checkpoint")
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises ConfigError as `read_manifest`, but asks for no size of a file."""
    return _parse(folder, lambda path: Manifest.from_json(read_text(path)))


def parse_head(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint without its `files`, whose number grows with the number of ranks.

    For ranks other than rank 0, which compares hash and sizes. Raises ConfigError if the manifest cannot be read.
    """
    manifest = _parse(folder, lambda path: Manifest.from_values(parse_json(read_head(path)[0].rstrip(",") + "}")))
    return parse_manifest(folder) if manifest.weights_only else manifest  # its fingerprint is compared


def read_head(path: Path) -> tuple[str, int]:
    """Return the text of a manifest up to its key "files", and the number of bytes of the file.

    Raises OSError, and ValueError without this key.
    """
    with open_regular(path) as file:
        content = b""
        while _FILES.encode() not in content:
            block = file.read(_HEAD_BYTES)
            if not block:
                raise ValueError('it has no key "files"')
            content += block
        return head_of(content.decode(errors="replace")), os.fstat(file.fileno()).st_size


def head_of(text: str) -> str:
    """Return the text of a manifest up to its key "files"."""
    return text.partition(_FILES)[0]


def _parse(folder: Path, read: Callable[[Path], Manifest]) -> Manifest:
    path = folder / MANIFEST
    remedy = "use another checkpoint"
    with file_errors(path, "the manifest cannot be read: {}", remedy), \
            file_errors(path, "the manifest is damaged: {}", remedy, (ValueError,)):
        manifest = read(path)
    if step_of(folder) not in (-1, manifest.step):
        problem = f"the manifest is of step {manifest.step}, but the folder's name says step {step_of(folder)}"
        raise ConfigError(str(path), problem=problem, remedy=f"rename the folder to global_step{manifest.step}")
    return manifest


def _size(file: Path) -> int | None:
    """Return the size in bytes; None if there is no regular file."""
    status = status_of(file)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 if the name is not global_stepN."""
    match = _FOLDER_NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """List every folder that is named global_stepN, complete or not, the highest step first ("newest")."""
    folders = (path for path in checkpoints.glob("global_step*") if step_of(path) >= 0)
    return sorted(folders, key=step_of, reverse=True)


def manifest_or_error(folder: Path, read: ReadManifest = read_manifest) -> Manifest | ConfigError:
    """Return the folder's manifest, or the ConfigError that `read` raises."""
    try:
        return read(folder)
    except ConfigError as error:
        return error


def manifests_or_errors(checkpoints: Path,
                        read: ReadManifest = read_manifest) -> Iterator[tuple[Path, Manifest | ConfigError]]:
    """Yield every folder that is named global_stepN, newest first, with its manifest or its error."""
    for folder in checkpoint_folders(checkpoints):
        yield folder, manifest_or_error(folder, read)


def complete_checkpoints(checkpoints: Path) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Return two lists: folder and manifest of each complete checkpoint, newest first; errors of the other folders."""
    complete: list[tuple[Path, Manifest]] = []
    errors: list[str] = []
    for folder, found in manifests_or_errors(checkpoints):
        if isinstance(found, ConfigError):
            errors.append(str(found))
        else:
            complete.append((folder, found))
    return complete, errors


def newest_good(checkpoints: Path, read: ReadManifest = read_manifest) -> tuple[Path, Manifest, list[str]] | None:
    """Return folder and manifest of the newest good checkpoint, and why newer ones are not used. None without any.

    The file `latest` is not read: it is outdated if a run was killed after a commit and before it updated this file.
    Raises ConfigError if there are checkpoints but none is good.
    """
    errors: list[str] = []
    not_finite: list[Path] = []
    for folder, found in manifests_or_errors(checkpoints, read):
        if isinstance(found, ConfigError):
            errors.append(str(found))
        elif not found.is_good:
            not_finite.append(folder)
        else:
            return folder, found, errors + not_finite_lines(not_finite)
    if errors or not_finite:
        raise no_good_checkpoint(checkpoints, errors + not_finite_lines(not_finite))
    return None


def not_finite_lines(folders: list[Path]) -> list[str]:
    """Return one line about all these checkpoints, which hold NaN or infinity; none if there are no such folders."""
    others = f" and {counted(len(folders) - 1, 'older checkpoint')}" if len(folders) > 1 else ""
    return [f"{folders[0]}{others}: {NOT_FINITE}"] if folders else []


def no_good_checkpoint(checkpoints: Path, reasons: list[str]) -> ConfigError:
    """Return the error for a checkpoints folder without a usable checkpoint.

    Args:
        reasons: why each checkpoint cannot be used, newest first, and problems of the mirror. The message has only the
            first of them.
    """
    return ConfigError(str(checkpoints), problem=f"no checkpoint can be used ({reasons[0]})",
                       remedy="restore one, or choose another --save")


def latest_name(checkpoints: Path) -> str:
    """Return the checkpoint's name in `latest`, or "". After a resume from an older step, it is not the newest one."""
    with contextlib.suppress(OSError, ValueError):
        return read_text(checkpoints / LATEST_FILE).strip()
    return ""


def latest_problem(checkpoints: Path, newest: Path) -> str | None:
    """Return why plain DeepSpeed, which reads the file `latest`, would not load `newest`; None if it would."""
    path = checkpoints / LATEST_FILE
    try:
        name = read_text(path).strip()
    except FileNotFoundError:
        return f"{path}: there is no such file, and plain DeepSpeed reads it"
    except (OSError, ValueError) as error:
        return f"{path}: the file cannot be read ({reason_of(error)})"
    if name == newest.name:
        return None
    if not name:
        return f"{path}: the file is empty"
    if "/" in name or not (checkpoints / name).is_dir():
        return f"{path}: it names {printable(shorten(name, 100))}, and there is no such checkpoint"
    found = manifest_or_error(checkpoints / name)
    if isinstance(found, ConfigError):
        return f"{path}: it names {name}, which is damaged"
    return f"{path}: it names {name}, " + ("which has NaN or infinite values" if not found.is_good else
                                           f"and the newest good checkpoint is {newest.name}")


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest good checkpoint; 0 if there is none."""
    with contextlib.suppress(ConfigError):
        found = newest_good(checkpoints)
        return found[1].step if found else 0
    return 0


def _lock_of(checkpoints: Path, rank: int) -> Path:
    """Return the path of a rank's lock file."""
    return checkpoints / f".writer-{rank:05d}.lock"


def hold_lock(checkpoints: Path, rank: int) -> TextIO:
    """Lock the file of `rank`'s writer until the returned file is closed. Waits for an earlier run's writer."""
    file = open(_lock_of(checkpoints, rank), "a", encoding="utf-8")  # noqa: SIM115 (the open file holds the lock)
    lock(file.fileno(), fcntl.LOCK_EX)
    return file


def has_ended(checkpoints: Path, rank: int) -> bool:
    """Return whether the writer of `rank` has ended.

    The result is False on file systems without locks. It is wrong for another host's writer on file systems where only
    processes of the same host see a lock; callers check `SaveJob.locks_are_shared`.
    """
    path = _lock_of(checkpoints, rank)
    return path.exists() and _is_free(path) is True


def wait_for_writers(checkpoints: Path, *, timeout_s: float, log: Callable[[str], None] = lambda _: None) -> None:
    """Wait until the writers of an earlier run, which may have been killed, have finished their saves.

    Raises SaveError after `timeout_s` seconds.
    """
    locks = list(checkpoints.glob(".writer-*.lock"))
    busy = [path for path, is_free in zip(locks, for_each_file(_is_free, locks), strict=True) if is_free is False]
    deadline = time.monotonic() + timeout_s
    if busy:
        log("waiting for a background writer of an earlier run")
    for path in busy:
        while _is_free(path) is False:
            if time.monotonic() > deadline:
                raise SaveError(f"{path}: a background writer of an earlier run is still saving after {timeout_s:g} s")
            time.sleep(_POLL_S)


def _is_free(path: Path) -> bool | None:
    """Return whether the lock is free; None if the file system has no locks."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        return lock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)  # several processes can check with a shared lock
    return True
