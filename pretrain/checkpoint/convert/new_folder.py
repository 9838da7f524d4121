"""Create the output folder of a conversion atomically: it is written under a temporary name, then renamed."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from pretrain.checkpoint.format.files import fsync, write_atomically
from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

# file in the output folder: the name of the conversion, the SHA-256 of the checkpoint's manifest, and all file sizes
SOURCE = "source.json"


def check_new_folder(out: Path) -> None:
    """Raise ConfigError if `out` exists and is not the output of a conversion, or if it cannot be written."""
    try:
        exists, is_output = out.exists(), (out / SOURCE).is_file()
    except OSError:
        exists = is_output = False
    if exists and not is_output:
        raise _already_exists_error(out)
    check_folder(out, str(out))


def fill_new_folder(folder: Path, out: Path, conversion: str, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary folder, then rename this folder to `out`.

    Do nothing if `out` is already the result of the same conversion of the same checkpoint. Raises ConfigError if `out`
    exists and has other content, or if a file cannot be read or written.

    Args:
        folder: the checkpoint that is converted.
        conversion: name and options of the conversion, for example "consolidate bf16".
    """
    source = {"what": conversion, "manifest_sha256": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()}
    if out.exists():
        if _is_same_conversion(out, source):
            return
        raise _already_exists_error(out)
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a conversion that was killed
        temporary.mkdir(parents=True)
        write(temporary)
        sizes = {str(path.relative_to(temporary)): path.stat().st_size
                 for path in sorted(temporary.rglob("*")) if path.is_file()}
        for path in temporary.rglob("*"):
            fsync(path)
        write_atomically(temporary / SOURCE, json.dumps({**source, "files": sizes}, indent=1))
        temporary.rename(out)
        fsync(out.parent)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(temporary):
            raise ConfigError(str(error.filename), problem=f"it cannot be read or created: {error.strerror}") from error
        raise ConfigError(str(out), problem=f"the folder cannot be written: {error.strerror or error}",
                          remedy="name a new folder on a disk with enough free space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _already_exists_error(out: Path) -> ConfigError:
    problem = "a file with this name exists"
    if out.is_dir():
        problem = "the folder exists and is not the output of this conversion"
    return ConfigError(str(out), problem=problem, remedy="remove it, or name a new folder")


def _is_same_conversion(out: Path, source: dict[str, str]) -> bool:
    """Return whether the SOURCE file of `out` matches `source`, and every file has its recorded size."""
    try:
        found = json.loads((out / SOURCE).read_text(encoding="utf-8"))
        sizes = found.pop("files")
        return found == source and all((out / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def output_summary(out: Path) -> str:
    """Describe an output folder in one line: its path, number of files and size."""
    sizes = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    return f"{out}: {len(sizes)} files, {sum(sizes) / 1e6:,.1f} MB"
