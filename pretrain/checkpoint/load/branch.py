"""Find the checkpoint of another run that --resume_from names, and record the branch. Imports no torch."""

import os
from pathlib import Path

from pretrain.checkpoint.format.manifest import (
    NOT_FINITE,
    Manifest,
    checkpoint_folders,
    newest_good,
    read_manifest,
    step_of,
)
from pretrain.checkpoint.load.init_from import manifest_fingerprint
from pretrain.checkpoint.load.select import find_checkpoints_folder, is_checkpoint
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.model_of_run import Branch
from pretrain.errors import ConfigError, shorten

_REMEDY = "name a run folder, RUN@STEP, or a global_stepN folder"


def find_branch(args: RunArguments) -> tuple[Path, Manifest, list[str]]:
    """Return folder and manifest of the checkpoint that --resume_from names, and why newer ones are not used.

    Only manifest and file sizes are read. Raises ConfigError if there is no such checkpoint, if it is damaged, has NaN
    or holds weights alone, or if it belongs to the run folder --save.
    """
    where, path, step = _parse(args)
    _check_folder(where, path)
    _reject_own_run(where, path, args.save)
    errors: list[str] = []
    if is_checkpoint(path):
        if step is not None:
            raise ConfigError(where, problem=f"{path} is a single checkpoint", remedy="leave out the @")
        folder, manifest = path, read_manifest(path)
    elif step is not None:
        folder = find_checkpoints_folder(path) / f"global_step{step}"
        if not folder.is_dir():
            raise _no_such_step(where, path, step)
        manifest = read_manifest(folder)
    elif (newest := newest_good(find_checkpoints_folder(path))) is not None:
        folder, manifest, errors = newest
    else:
        raise ConfigError(where, problem="the folder holds no checkpoint", remedy=_REMEDY)
    if not manifest.is_good:
        raise ConfigError(where, problem=f"{folder}: {NOT_FINITE}", remedy="use another checkpoint")
    if manifest.weights_only:
        raise ConfigError(where, problem=f"{folder} holds weights alone, and no state of a run",
                          remedy=f"--init_from {folder} starts a run with them")
    return folder, manifest, [f"not used for --resume_from: {error}" for error in errors]


def branch_of(folder: Path, manifest: Manifest) -> Branch:
    """Return the record of a branch from this checkpoint."""
    return Branch(str(_run_of(folder)), manifest.step, os.path.abspath(folder), manifest_fingerprint(manifest))


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
        raise ConfigError(where, problem=problem, remedy=_REMEDY)


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


def _no_such_step(where: str, path: Path, step: int) -> ConfigError:
    steps = [str(step_of(folder)) for folder in checkpoint_folders(find_checkpoints_folder(path))]
    if not steps:
        return ConfigError(where, problem="the folder holds no checkpoint", remedy=_REMEDY)
    return ConfigError(where, problem=f"{path} has no checkpoint of step {step}",
                       remedy=f"the run has the step{'s' * (len(steps) > 1)} {', '.join(steps)}")
