"""Create the output folder of a conversion atomically: it is written under a temporary name, then renamed."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pretrain.checkpoint.format.hashed_files import FileRecord, sha256_of, write_atomically
from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import step_of
from pretrain.errors import ConfigError, counted, file_errors, one_line
from pretrain.paths import check_folder, free_bytes, fsync, lock, status_of
from pretrain.stored_json import build, read_object

# file in the output folder: the name of the conversion, the SHA-256 of the checkpoint's manifest, size and SHA-256 of
# all other files
SOURCE = "source.json"
_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


def check_new_folder(out: Path, *, or_same_conversion: bool = True) -> None:
    """Raise ConfigError if `out` exists, or if it cannot be written.

    Args:
        or_same_conversion: accept an existing output of a conversion. `fill_new_folder` then compares both.
    """
    if os.path.exists(out) and not (or_same_conversion and os.path.isfile(out / SOURCE)):
        raise _already_exists_error(out, "of this conversion" if or_same_conversion else "")
    check_folder(out, str(out), is_new=True)


def check_new_weights(out: Path, kind: str) -> None:
    """Raise ConfigError if weights alone ("imported", "averaged") cannot be written as a run or checkpoint `out`."""
    if step_of(out) > 0:
        raise ConfigError("--output", problem=f"{out} names the checkpoint of step {step_of(out)}, and {kind} weights "
                          "are of step 0", remedy="name a run folder, or a folder global_step0")
    check_new_folder(out, or_same_conversion=False)


def check_free_space(out: Path, needed_bytes: int) -> None:
    """Raise ConfigError if the disk of `out` has less free space than `needed_bytes`."""
    free = free_bytes(out.absolute().parent)
    if free < needed_bytes:
        raise ConfigError(str(out), problem=f"the output needs {needed_bytes / 1e6:,.1f} MB, and the disk has only "
                          f"{free / 1e6:,.1f} MB of free space", remedy="name a folder on another disk")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `out` after the block.

    After an error, Ctrl-C or SIGTERM, the temporary folder is removed. After SIGKILL, the next call removes it. Raises
    ConfigError if a file cannot be read or written, or if another process writes the same folder now.
    """
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        with _sigterm_raises(), _locked_folder(temporary, out):
            yield temporary
            for path in temporary.rglob("*"):
                fsync(path)
            temporary.rename(out)
            fsync(out.absolute().parent)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(temporary):
            raise ConfigError(str(error.filename), problem=f"it cannot be read or created: {error.strerror}") from error
        raise ConfigError(str(out), problem=f"the folder cannot be written: {error.strerror or error}",
                          remedy="name a new folder on a disk with enough free space") from error


@contextlib.contextmanager
def _locked_folder(folder: Path, out: Path) -> Iterator[None]:
    """Create an empty folder that only this process writes in the block; remove it afterwards unless it was renamed.

    Raises ConfigError if another process has it. File systems without locks on folders do not show that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB) is False or not _is_open_folder(folder, opened):
            raise ConfigError(str(out), problem="another process is writing this folder now",
                              remedy="wait until it has ended, or name another folder")
        try:
            for path in folder.iterdir():  # left by a conversion that was killed
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield
        finally:
            if _is_open_folder(folder, opened):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(opened)


def _is_open_folder(folder: Path, opened: int) -> bool:
    """Return whether the path still names the opened folder, which may have been renamed."""
    status = status_of(folder)
    return status is not None and os.path.samestat(status, os.fstat(opened))


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in the block, so that cleanup code runs. Only the main thread can change this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(_SIGTERM_EXIT_CODE)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def fill_new_folder(folder: Path, out: Path, conversion: str,
                    write: Callable[[Path], Mapping[str, FileRecord] | None]) -> None:
    """Call `write` with a temporary folder, add SOURCE, then rename this folder to `out`.

    Do nothing if `out` is already the result of the same conversion of the same checkpoint. Raises ConfigError if `out`
    exists and has other content, or if a file cannot be read or written.

    Args:
        folder: the checkpoint that is converted.
        conversion: name and options of the conversion, for example "export bf16".
        write: may return the records of files that it has hashed. The other files are hashed afterwards.
    """
    with file_errors(folder, "its manifest cannot be read any more: {}",
                     "if a run removes old checkpoints now, export a checkpoint that it keeps"):
        manifest = (folder / MANIFEST).read_bytes()
    source = {"what": conversion, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    if out.exists():
        if _is_same_conversion(out, source):
            return
        raise _already_exists_error(out, "of this conversion")
    with new_folder(out) as temporary:
        known = write(temporary) or {}
        files = {}
        for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
            name = str(path.relative_to(temporary))
            files[name] = asdict(known.get(name) or FileRecord(path.stat().st_size, sha256_of(path)))
        write_atomically(temporary / SOURCE, json.dumps({**source, "files": files}, indent=1))


def _already_exists_error(out: Path, accepted: str) -> ConfigError:
    problem = "a file with this name exists"
    if out.is_dir():
        problem = f"the folder exists and is not the output {accepted}" if accepted else "the folder exists"
    return ConfigError(str(out), problem=problem, remedy="remove it, or name a new folder")


def _is_same_conversion(out: Path, source: dict[str, str]) -> bool:
    """Return whether the SOURCE file of `out` matches `source`, and every file has its recorded size."""
    with contextlib.suppress(OSError, ValueError):
        found = read_object(out / SOURCE)
        files = build(dict[str, FileRecord], found.pop("files", None))
        return found == source and all((out / name).stat().st_size == record.bytes for name, record in files.items())
    return False


def output_summary(out: Path) -> str:
    """Describe an output folder in one line: its path, number of files and size."""
    sizes = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    return f"{one_line(str(out))}: {counted(len(sizes), 'file')}, {sum(sizes) / 1e6:,.1f} MB"
