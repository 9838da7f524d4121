"""Find what a new run begins with: the weights of --init_from, or the checkpoint of another run (--resume_from).

This module records where they come from, and imports no torch. `load_checkpoint.py` loads them.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import MANIFEST, NOT_FINITE, Manifest
from pretrain.checkpoint.format.run_checkpoints import ReadManifest, checkpoint_folders, read_manifest
from pretrain.checkpoint.load.find_checkpoint import checkpoint_at, find_checkpoints_folder, is_checkpoint, steps_text
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.model_of_run import Branch, Origin, SavedModel
from pretrain.errors import ConfigError, shorten
from pretrain.hub import find_repository, is_repository, snapshot_in
from pretrain.model.config import model_config_from

_BRANCH_REMEDY = "name a run folder, RUN@STEP, or a global_stepN folder"
_REMEDY = "name a transformers folder with safetensors, a run folder, a global_stepN folder, or a repository (org/name)"


@dataclass(frozen=True)
class InitialWeights:
    """Weights that a run starts from: of a transformers folder or of a checkpoint."""

    source: HFFolder | tuple[Path, Manifest]
    model: SavedModel
    origin: Origin
    notes: tuple[str, ...] = ()  # newer checkpoints that are not used

    @property
    def files(self) -> HFFolder | Path:
        """The folder that `load_weights` reads."""
        return self.source if isinstance(self.source, HFFolder) else self.source[0]


def source_name(init_from: str) -> str:
    """Return the name of a source that does not depend on the current folder: an absolute path or a repository."""
    return init_from if is_repository(init_from) else os.path.abspath(init_from)


def find_initial_weights(init_from: str, read: ReadManifest = read_manifest) -> InitialWeights:
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
        return _of_checkpoint(init_from, folder, read)
    if not (folder / "config.json").is_file():
        raise ConfigError(where, problem="the folder has neither a config.json nor checkpoints", remedy=_REMEDY)
    found = check_hf_folder(folder)
    return InitialWeights(found, SavedModel(found.config, str(folder / "config.json")), origin_of_folder(
        found, source_name(init_from)))


def check_origin(init_from: str, folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError if a run that resumes from a checkpoint did not start from the weights of --init_from.

    The source itself is read only if its path is not the recorded one, because it may have been removed since.
    """
    where, remedy = f"--init_from {shorten(init_from)}", "leave --init_from out, or choose another --save"
    if manifest.weights_only:
        raise ConfigError(where, problem=f"the run folder already holds weights to start from, {folder}", remedy=remedy)
    origin = manifest.origin_in(folder)
    if origin is not None and origin.name in (init_from, os.path.abspath(init_from)):
        return
    with contextlib.suppress(ConfigError):
        if origin is not None and not is_repository(init_from) and \
                find_initial_weights(init_from).origin.fingerprint == origin.fingerprint:
            return
    source = "random weights" if origin is None else origin.name
    raise ConfigError(where, problem=f"the run resumes from {folder}, and it started from {source}", remedy=remedy)


def _of_checkpoint(init_from: str, path: Path, read: ReadManifest) -> InitialWeights:
    found = checkpoint_at(path, read=read)
    if found is None:
        raise ConfigError(f"--init_from {shorten(init_from)}", problem="the folder holds no checkpoint", remedy=_REMEDY)
    folder, manifest, errors = found
    if not manifest.is_good:
        raise ConfigError(f"--init_from {shorten(init_from)}", problem=NOT_FINITE, remedy="use another checkpoint")
    where = f"{folder / MANIFEST}: model"
    model = SavedModel(model_config_from(manifest.model, where), where)
    origin = Origin(source_name(init_from), os.path.abspath(folder), manifest.fingerprint)
    return InitialWeights((folder, manifest), model, origin, tuple(f"not used for --init_from: {error}"
                                                                   for error in errors))


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


def find_branch(args: RunArguments, read: ReadManifest = read_manifest) -> tuple[Path, Manifest, list[str]]:
    """Return folder and manifest of the checkpoint that --resume_from names, and why newer ones are not used.

    Only manifest and file sizes are read. Raises ConfigError if there is no such checkpoint, if it is damaged, has NaN
    or holds weights alone, or if it belongs to the run folder --save.
    """
    where, path, step = _parse(args)
    _check_folder(where, path)
    _reject_own_run(where, path, args.save)
    if step is not None and is_checkpoint(path):
        raise ConfigError(where, problem=f"{path} is a single checkpoint", remedy="leave out the @")
    found = checkpoint_at(path, step, read)
    if found is None:
        steps = steps_text(path)
        if step is None or not steps:
            raise ConfigError(where, problem="the folder holds no checkpoint", remedy=_BRANCH_REMEDY)
        raise ConfigError(where, problem=f"{path} has no checkpoint of step {step}", remedy=f"the run has the {steps}")
    folder, manifest, errors = found
    if not manifest.is_good:
        raise ConfigError(where, problem=f"{folder}: {NOT_FINITE}", remedy="use another checkpoint")
    if manifest.weights_only:
        raise ConfigError(where, problem=f"{folder} holds weights alone, and no state of a run",
                          remedy=f"--init_from {folder} starts a run with them")
    return folder, manifest, [f"not used for --resume_from: {error}" for error in errors]


def branch_of(folder: Path, manifest: Manifest) -> Branch:
    """Return the record of a branch from this checkpoint."""
    return Branch(str(_run_of(folder)), manifest.step, os.path.abspath(folder), manifest.fingerprint)


def check_same_branch(args: RunArguments, folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError if the checkpoint of a run folder did not begin with the one that --resume_from names.

    The source is read only if its path is not the recorded one, because it may have been removed since.
    """
    where, path, step = _parse(args)
    _reject_own_run(where, path, args.save)
    source = manifest.lineage[-1] if manifest.lineage else None
    named = os.path.abspath(path)
    is_recorded = source is not None and named in (source["run"], source["folder"])
    if source is not None and is_recorded and step in (None, source["step"]):
        return
    if source is not None and not is_recorded and Path(named).is_dir() and \
            branch_of(*find_branch(args)[:2]).fingerprint == source["fingerprint"]:
        return
    began = f"branched from step {source['step']} of {source['run']}" if source else "did not begin with a branch"
    raise ConfigError(where, problem=f"the run resumes from {folder}, and it {began}",
                      remedy="leave --resume_from out, or choose another --save")


def _parse(args: RunArguments) -> tuple[str, Path, int | None]:
    """Return the flag for messages, the path, and the step of RUN@STEP."""
    text = str(args.resume_from)
    where = f"--resume_from {shorten(text)}"
    run, at, step = text.rpartition("@")
    if at and step.isdecimal() and not Path(text).exists():
        return where, Path(run), int(step)
    return where, Path(text), None


def _check_folder(where: str, path: Path) -> None:
    if not path.is_dir():
        problem = "this is a file, and not a folder" if path.exists() else f"there is no folder {path}"
        raise ConfigError(where, problem=problem, remedy=_BRANCH_REMEDY)


def _reject_own_run(where: str, path: Path, save: str) -> None:
    """Raise ConfigError if --resume_from names the run folder --save, or a checkpoint in it."""
    if os.path.realpath(_run_of(path) if is_checkpoint(path) else path) in \
            (os.path.realpath(save), os.path.realpath(Path(save) / "checkpoints")):
        raise ConfigError(where, problem=f"this is the run folder --save {save} itself",
                          remedy="choose another --save for the branch; without --resume_from, the run resumes from "
                          "its newest checkpoint")


def _run_of(folder: Path) -> Path:
    """Return the run folder of a checkpoint; of one that lies elsewhere, the folder around it."""
    parents = folder.absolute().parents
    around = parents[1] if parents[0].name.startswith("abandoned-") else parents[0]
    return around.parent if around.name == "checkpoints" else around
