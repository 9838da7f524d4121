"""The checkpoints of a run: which are complete, which one is the newest good one, and the file `latest`. No torch.

A checkpoint is complete if `read_manifest` accepts it, and good unless its manifest says that it holds NaN or infinity.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.checkpoint.format.manifest import NOT_FINITE, Manifest, read_manifest, step_of
from pretrain.errors import ConfigError, counted, printable, shorten
from pretrain.stored_json import read_text

ReadManifest = Callable[[Path], Manifest]  # raises ConfigError
LATEST_FILE = "latest"  # in the checkpoints folder: the name of the newest checkpoint, for plain DeepSpeed


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
    try:
        return read_text(checkpoints / LATEST_FILE).strip()
    except (OSError, ValueError):
        return ""


def latest_problem(checkpoints: Path, newest: Path) -> str | None:
    """Return why plain DeepSpeed, which reads the file `latest`, would not load `newest`; None if it would."""
    path = checkpoints / LATEST_FILE
    try:
        name = read_text(path).strip()
    except FileNotFoundError:
        return f"{path}: there is no such file, and plain DeepSpeed reads it"
    except (OSError, ValueError) as error:
        return f"{path}: the file cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
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
