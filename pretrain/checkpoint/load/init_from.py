"""Find the weights of --init_from and check that they fit the run, without torch. `load_weights.py` loads them."""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    NOT_FINITE,
    Manifest,
    checkpoint_folders,
    newest_good,
    read_manifest,
)
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder
from pretrain.checkpoint.load.select import find_checkpoints_folder, is_checkpoint
from pretrain.config.model_of_run import Origin, SavedModel
from pretrain.errors import ConfigError, shorten
from pretrain.hub import find_repository, is_repository, snapshot_in
from pretrain.model.config import model_config_from

_REMEDY = "name a transformers folder with safetensors, a run folder, a global_stepN folder, or a repository (org/name)"


@dataclass(frozen=True)
class InitialWeights:
    """Weights that a run starts from: those of a transformers folder or of a checkpoint."""

    source: HFFolder | tuple[Path, Manifest]
    model: SavedModel
    origin: Origin
    notes: tuple[str, ...] = ()  # newer checkpoints that are not used


def source_name(init_from: str) -> str:
    """Return the name of a source that does not depend on the current folder: an absolute path or a repository."""
    return init_from if is_repository(init_from) else os.path.abspath(init_from)


def find_initial_weights(init_from: str) -> InitialWeights:
    """Return the weights that --init_from names. Reads the headers of the files, and sizes, but no weights.

    Raises:
        ConfigError: there is no such folder, it has no weights, or they are damaged, incomplete or of another model
            than its config.json.
    """
    if is_repository(init_from):
        folder = find_repository(init_from, flag="--init_from", want="weights")
    else:
        folder = snapshot_in(Path(init_from))
    where = f"--init_from {shorten(init_from)}"
    if not folder.is_dir():
        problem = "this is a file, and not a folder" if folder.exists() else "there is no such folder"
        raise ConfigError(where, problem=problem, remedy=_REMEDY)
    checkpoints = find_checkpoints_folder(folder)
    if is_checkpoint(folder) or checkpoints != folder or checkpoint_folders(checkpoints):
        return _of_checkpoint(init_from, folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(where, problem="the folder has neither a config.json nor checkpoints", remedy=_REMEDY)
    found = check_hf_folder(folder)
    return InitialWeights(found, SavedModel(found.config, str(folder / "config.json")), origin_of_folder(
        found, source_name(init_from)))


def origin_of(folder: Path, manifest: Manifest) -> Origin | None:
    """Return where the first weights of a checkpoint's run came from; None: random weights.

    Imported weights without a record are their own origin.
    """
    if manifest.origin is not None:
        return Origin(**manifest.origin)
    if not manifest.weights_only:
        return None
    return Origin(os.path.abspath(folder), os.path.abspath(folder), manifest_fingerprint(manifest))


def check_origin(init_from: str, folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError if a run that resumes from a checkpoint did not start from the weights of --init_from.

    The source itself is read only if its path is not the recorded one, because it may have been removed since.
    """
    where, remedy = f"--init_from {shorten(init_from)}", "leave --init_from out, or choose another --save"
    if manifest.weights_only:
        raise ConfigError(where, problem=f"the run folder already holds weights to start from, {folder}", remedy=remedy)
    origin = origin_of(folder, manifest)
    if origin is not None and origin.name in (init_from, os.path.abspath(init_from)):
        return
    with contextlib.suppress(ConfigError):
        if origin is not None and not is_repository(init_from) and \
                find_initial_weights(init_from).origin.fingerprint == origin.fingerprint:
            return
    source = "random weights" if origin is None else origin.name
    raise ConfigError(where, problem=f"the run resumes from {folder}, and it started from {source}", remedy=remedy)


def _of_checkpoint(init_from: str, path: Path) -> InitialWeights:
    errors: list[str] = []
    if is_checkpoint(path):
        folder, manifest = path, read_manifest(path)
        if not manifest.is_good:
            raise ConfigError(f"--init_from {shorten(init_from)}", problem=NOT_FINITE, remedy="use another checkpoint")
    elif (newest := newest_good(find_checkpoints_folder(path))) is not None:
        folder, manifest, errors = newest
    else:
        raise ConfigError(f"--init_from {shorten(init_from)}", problem="the folder holds no checkpoint", remedy=_REMEDY)
    where = f"{folder / MANIFEST}: model"
    model = SavedModel(model_config_from(manifest.model, where), where)
    origin = Origin(source_name(init_from), os.path.abspath(folder), manifest_fingerprint(manifest))
    return InitialWeights((folder, manifest), model, origin, tuple(f"not used for --init_from: {error}"
                                                                   for error in errors))


def manifest_fingerprint(manifest: Manifest) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which has the hashes of all its files."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def origin_of_folder(found: HFFolder, name: str) -> Origin:
    """Return the record of a transformers folder as the source of weights.

    Its fingerprint is the SHA-256 of config.json, and of the sizes and headers of the weights files.
    """
    digest = hashlib.sha256((found.folder / "config.json").read_bytes())
    for file in found.files:
        with open(found.folder / file, "rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
        digest.update(f"{file} {found.bytes_of(file)}\n".encode())
        digest.update(header)
    return Origin(name, os.path.abspath(found.folder), digest.hexdigest())
