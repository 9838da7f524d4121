"""Find the checkpoint or transformers folder, and the tokenizer, that a tool reads. Imports no torch."""

import contextlib
from pathlib import Path

from pretrain.checkpoint.format.manifest import MANIFEST, NOT_FINITE, Manifest
from pretrain.checkpoint.format.run_checkpoints import (
    ReadManifest,
    checkpoint_folders,
    manifest_or_error,
    manifests_or_errors,
    newest_good,
    read_manifest,
    step_of,
)
from pretrain.data.data_spec import recorded_data_spec
from pretrain.data.token_files.indexed_dataset import read_meta
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.hub import recorded_tokenizer, snapshot_in
from pretrain.monitor.read_run_folder import newest_start


def find_checkpoints_folder(path: Path) -> Path:
    """Return the checkpoints folder of the run folder `path`, or `path` if it is a checkpoints folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_checkpoints(path: Path) -> list[tuple[Path, Manifest | ConfigError]]:
    """List folder, and manifest or error, of all checkpoints of a run folder or checkpoints folder, newest first.

    If `path` is a single checkpoint, return only this one.

    Raises ConfigError if there is no checkpoint.
    """
    if is_checkpoint(path):
        return [(path, manifest_or_error(path))]
    found = list(manifests_or_errors(find_checkpoints_folder(path)))
    if not found:
        raise _no_checkpoint(path)
    return found


def find_checkpoint(path: Path, step: int | None = None,
                    read: ReadManifest = read_manifest) -> tuple[Path, Manifest, tuple[str, ...]]:
    """Return folder, manifest and notes of the checkpoint at `path`.

    In a run folder, it is the checkpoint of `step`, or the newest good one. The notes name newer checkpoints that are
    not used, or NaN or infinity in this one. Raises ConfigError.
    """
    found = checkpoint_at(path, step, read)
    if found is None:
        steps = steps_text(path)
        if step is None or not steps:
            raise _no_checkpoint(path)
        raise ConfigError(f"--step {step}", problem=f"{path} has no checkpoint of this step",
                          remedy=f"the run has the {steps}")
    folder, manifest, reasons = found
    if step is not None and manifest.step != step:
        raise ConfigError("--step", problem=f"step {step} was requested, but {path} is the checkpoint of step "
                          f"{manifest.step}", remedy="name the run folder, or leave --step out")
    # a checkpoint with NaN or infinity that the user has named can still be studied
    notes = [f"not used: {reason}" for reason in reasons] if manifest.is_good else [f"{folder}: {NOT_FINITE}"]
    return folder, manifest, tuple(notes)


def checkpoint_at(path: Path, step: int | None = None,
                  read: ReadManifest = read_manifest) -> tuple[Path, Manifest, list[str]] | None:
    """Return folder and manifest of a checkpoint, and why newer ones are not used; None if there is no checkpoint.

    This is `path`, if it is a checkpoint. In a run folder, it is the checkpoint of `step`, or the newest good one.
    Raises ConfigError if the checkpoint is damaged.
    """
    checkpoints = find_checkpoints_folder(path)
    if not is_checkpoint(path) and step is None:
        return newest_good(checkpoints, read)
    folder = path if is_checkpoint(path) else checkpoints / f"global_step{step}"
    return (folder, read(folder), []) if folder.is_dir() else None


def steps_text(path: Path) -> str:
    """Return the steps of all checkpoints of a run as text, such as "steps 2, 1"; "" without checkpoints."""
    steps = [str(step_of(folder)) for folder in checkpoint_folders(find_checkpoints_folder(path))]
    return f"step{'s' * (len(steps) > 1)} {', '.join(steps)}" if steps else ""


def _no_checkpoint(path: Path) -> ConfigError:
    problem = "this is a file, and not a folder" if path.exists() else "there is no such folder"
    return ConfigError(str(path), problem="the folder holds no checkpoint" if path.is_dir() else problem,
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
        return recorded_tokenizer(tokenizer)
    imported = next((folder for folder in _possible_runs(path)
                     if (folder / "checkpoints").is_dir() and (folder / "tokenizer").is_dir()), None)
    if imported is not None:  # by `ds-pretrain import`
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
        prefixes = recorded_data_spec({"train_data": value}).train if isinstance(value, (str, list)) else ()
        meta = read_meta(prefixes[0]) if prefixes else None  # all sources have the same tokenizer
        path = meta.get("tokenizer") if meta is not None else None
        if meta is not None and isinstance(path, str) and load_tokenizer(recorded_tokenizer(path)).fingerprint == \
                meta.get("tokenizer_sha256"):
            return path
    return None
