"""Find the checkpoint or transformers folder, and the tokenizer, that a tool reads. Imports no torch."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    NOT_FINITE,
    Manifest,
    checkpoint_folders,
    manifest_or_error,
    newest_good,
    read_manifest,
    step_of,
)
from pretrain.data.data_spec import parse_data_spec
from pretrain.data.token_files.indexed_dataset import read_meta
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.hub import snapshot_in
from pretrain.monitor.read_run_folder import newest_start


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's folder, with its manifest or with the reason why it is unusable."""

    folder: Path
    manifest: Manifest | None  # None: see `error`
    error: str = ""
    notes: tuple[str, ...] = ()  # newer checkpoints that are not used; NaN or infinity in this one

    @property
    def step(self) -> int:
        """Step from the manifest, or from the folder's name if there is no manifest."""
        return self.manifest.step if self.manifest else step_of(self.folder)

    @property
    def num_bytes(self) -> int:
        """Total size of the files that the manifest names; 0 if there is no manifest."""
        return sum(record.bytes for record in self.manifest.files.values()) if self.manifest else 0


def find_checkpoints_folder(path: Path) -> Path:
    """Return the checkpoints folder of the run folder `path`, or `path` if it is a checkpoints folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_checkpoints(path: Path) -> list[FoundCheckpoint]:
    """List the checkpoints of a run folder or checkpoints folder, newest first.

    If `path` is a single checkpoint, return only this one.

    Raises ConfigError if there is no checkpoint.
    """
    if is_checkpoint(path):
        return [_found_checkpoint(path)]
    folders = checkpoint_folders(find_checkpoints_folder(path))
    if not folders:
        raise _no_checkpoint(path)
    return [_found_checkpoint(folder) for folder in folders]


def find_checkpoint(path: Path, *, step: int | None = None) -> FoundCheckpoint:
    """Return the checkpoint at `path`. In a run folder, return the checkpoint of `step`, or the newest good one.

    Raises ConfigError.
    """
    if is_checkpoint(path):
        found = _named_checkpoint(path)
        if step is not None and found.step != step:
            raise ConfigError("--step", problem=f"step {step} was requested, but {path} is the checkpoint of step "
                              f"{found.step}", remedy="name the run folder, or leave --step out")
        return found
    if step is not None:
        folder = find_checkpoints_folder(path) / f"global_step{step}"
        if not folder.is_dir():
            raise _no_such_step(path, step)
        return _named_checkpoint(folder)
    newest = newest_good(find_checkpoints_folder(path))
    if newest is None:
        raise _no_checkpoint(path)
    return FoundCheckpoint(newest[0], newest[1], notes=tuple(f"not used: {reason}" for reason in newest[2]))


def _named_checkpoint(folder: Path) -> FoundCheckpoint:
    """Return the checkpoint that the user has named. With NaN or infinity it can still be studied."""
    manifest = read_manifest(folder)
    return FoundCheckpoint(folder, manifest, notes=() if manifest.is_good else (f"{folder}: {NOT_FINITE}",))


def _no_such_step(path: Path, step: int) -> ConfigError:
    steps = ", ".join(str(step_of(folder)) for folder in checkpoint_folders(find_checkpoints_folder(path)))
    if not steps:
        return _no_checkpoint(path)
    return ConfigError(f"--step {step}", problem=f"{path} has no checkpoint of this step", remedy="the run has the "
                       f"{'steps' if ',' in steps else 'step'} {steps}")


def _no_checkpoint(path: Path) -> ConfigError:
    return ConfigError(str(path), problem="the folder holds no checkpoint",
                       remedy="name a run folder (the value of --save) or a global_stepN folder")


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is the folder of one checkpoint, damaged or not."""
    return (step_of(path) >= 0 and path.is_dir()) or (path / MANIFEST).is_file()


def find_transformers_folder(path: Path, step: int | None) -> Path | None:
    """Return the transformers folder at `path`; None if there is a run or a checkpoint, or nothing.

    In a folder models--ORG--NAME of the Hub's cache, this is the snapshot. Raises ConfigError if `step`, the value of
    --step, is given for a transformers folder.
    """
    folder = snapshot_in(path)
    has_checkpoints = is_checkpoint(folder) or any(find_checkpoints_folder(folder).glob("global_step*"))
    if has_checkpoints or not (folder / "config.json").is_file():
        return None
    if step is not None:
        raise ConfigError("--step", problem=f"{path} is a transformers folder, which has no steps",
                          remedy="leave --step out")
    return folder


def _found_checkpoint(folder: Path) -> FoundCheckpoint:
    found = manifest_or_error(folder)
    if isinstance(found, ConfigError):
        return FoundCheckpoint(folder, None, str(found))
    return FoundCheckpoint(folder, found)


def select_checkpoint(path: Path, step: int | None = None) -> tuple[Path, Manifest, tuple[str, ...]]:
    """Return folder, manifest and notes of the checkpoint that `find_checkpoint` finds.

    Raises ConfigError.
    """
    if not path.is_dir():
        problem = "this is a file, and not a folder" if path.exists() else "there is no such folder"
        raise ConfigError(str(path), problem=problem,
                          remedy="name a run folder (the value of --save) or a global_stepN folder")
    found = find_checkpoint(path, step=step)
    assert found.manifest is not None
    return found.folder, found.manifest, found.notes


def run_folder_of(path: Path) -> Path | None:
    """Return the folder with the run.json of the run that `path` belongs to; None if there is none."""
    return next((folder for folder in _possible_runs(path) if (folder / "run.json").is_file()), None)


def _possible_runs(path: Path) -> tuple[Path, ...]:
    return (path, *path.absolute().parents[:2])  # `path` may be RUN, RUN/checkpoints or RUN/checkpoints/global_stepN


def tokenizer_of(path: Path) -> str:
    """Return the --tokenizer of the run that this folder belongs to.

    Without this flag: the tokenizer that its weights came with, or else the one that prepared its training data.
    Raises ConfigError if there is none of these.
    """
    run = run_folder_of(path)
    tokenizer = None if run is None else newest_start(run)["flags"].get("tokenizer")
    if isinstance(tokenizer, str):
        return tokenizer
    imported = next((folder for folder in _possible_runs(path)
                     if (folder / "checkpoints").is_dir() and (folder / "tokenizer").is_dir()), None)
    if imported is not None:  # by tools/import_hf.py
        return str(imported / "tokenizer")
    if run is not None and (prepared := _tokenizer_of_data(run)) is not None:
        return prepared
    missing = f"there is no run.json for {path}" if run is None else f"{run / 'run.json'} names no tokenizer"
    raise ConfigError("--tokenizer", problem=f"the flag is missing, and {missing}",
                      remedy="name the tokenizer that prepared the data")


def _tokenizer_of_data(run: Path) -> str | None:
    """Return the file that prepared the training data of a run; None if it is unknown or has changed since."""
    value = newest_start(run)["flags"].get("train_data")
    with contextlib.suppress(ConfigError, OSError):
        prefixes = parse_data_spec(value).train if isinstance(value, (str, list)) else ()
        meta = read_meta(prefixes[0]) if prefixes else None  # all sources have the same tokenizer
        path = meta.get("tokenizer") if meta is not None else None
        if meta is not None and isinstance(path, str) and load_tokenizer(path).fingerprint == \
                meta.get("tokenizer_sha256"):
            return path
    return None
