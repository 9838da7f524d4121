"""Validate a run together with the checkpoint that it resumes from, or the weights that it starts from. No torch."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import parse_head, read_manifest
from pretrain.checkpoint.load.hf_folder import HFFolder, find_hf_tokenizer
from pretrain.checkpoint.load.init_from import InitialWeights, find_initial_weights
from pretrain.checkpoint.load.resume import FoundCheckpoint, Resume, choose_checkpoint, make_resume
from pretrain.checkpoint.load.same_data import check_sampled_blocks
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_flags import check_folders
from pretrain.config.model_of_run import SavedModel, check_same_parameters
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.data.token_files.indexed_dataset import read_meta
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.distributed.device import Device
from pretrain.distributed.process import check_open_files
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.model.own_models import import_own_model
from pretrain.paths import check_no_stop_file, free_bytes


@dataclass(frozen=True)
class Start:
    """A validated run, and the checkpoint or weights that it begins with."""

    plan: Plan
    resume: Resume | None  # checkpoint of the run folder; the ranks choose it again, and verify it
    weights: InitialWeights | None  # weights of --init_from; None without the flag, or if the run resumes

    @property
    def plan_to_run(self) -> Plan:
        """The plan with the changes of the resume."""
        return self.plan if self.resume is None else self.resume.plan

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the resume."""
        return () if self.resume is None else tuple(self.resume.warnings)


def check_start(args: RunArguments, *, world_size: int, device: Device, complete: bool = True,
                first_of_host: bool = True) -> Start:
    """Validate a run, its checkpoints and the weights of --init_from. Raises ConfigError for the first error.

    --init_from is read only if the run folder has no checkpoint: the source may be removed after the first one.

    Args:
        complete: also read what grows with the number of ranks, sizes of a checkpoint's files and run.json, and what
            is only reported, the free space. Rank 0 does it, and the launchers.
        first_of_host: also write into the folders, to check that this is possible. One rank of each host does it.
    """
    check_open_files()
    import_own_model(args.model, args.model_code)
    if first_of_host:
        check_folders(args.save, args.checkpoint_mirror)  # before the run folder is searched for checkpoints
    check_no_stop_file(Path(args.save))
    found = choose_checkpoint(args, complete=complete)
    weights = find_initial_weights(args.init_from, read_manifest if complete else parse_head) \
        if args.init_from is not None and found is None else None
    plan = check_run(args, world_size=world_size, device=device, saved_model=_saved_model(args, found, weights),
                     has_weights=found is not None or weights is not None)
    notes = check_sampled_blocks(plan)
    if found is None and args.override is not None and args.checkpoint_mirror is None:
        notes.append("--override has no effect: the run begins at step 0")
    if weights is not None:
        notes += [*weights.notes, *check_same_parameters(weights.model.config, plan.model,
                                                         folder=Path(weights.origin.folder), model=args.model,
                                                         overrides=args.model_overrides),
                  *_tokenizer_notes(plan, weights)]
    if complete:
        notes += _disk_notes(plan, resumes=found is not None)
    plan = replace(plan, origin=weights.origin if weights else None, notes=(*plan.notes, *notes))
    return Start(plan, make_resume(*found, plan, with_record=complete) if found else None, weights)


def _saved_model(args: RunArguments, found: FoundCheckpoint | None,
                 weights: InitialWeights | None) -> SavedModel | None:
    """Return the model of the weights with which the run begins; None: --model describes it."""
    if weights is not None or found is None or args.model:
        return weights.model if weights else None
    folder, manifest, _ = found
    where = f"{folder / MANIFEST}: model"
    return SavedModel(model_config_from(manifest.model, where), where)


def _disk_notes(plan: Plan, *, resumes: bool) -> list[str]:
    """Note that the checkpoints do not fit the disk of the run folder, before a save fails hours later."""
    args, size = plan.args, plan.layout.checkpoint_bytes(plan.model.num_parameters())
    saves = -(-plan.train_steps // args.save_interval) if args.save_interval else 1
    kept = args.keep_checkpoints + 1 if args.keep_checkpoints else saves  # the oldest is removed after a save
    number = 1 if resumes else min(saves, kept)
    free = free_bytes(Path(args.save).absolute())
    if free >= number * size:
        return []
    needed = f"{number} checkpoints of {_gb(size)}" if number > 1 else f"a checkpoint of {_gb(size)}"
    remedy = "free some, or choose another folder"
    if number > 3 and not args.keep_checkpoints:
        remedy = "--keep_checkpoints 2 removes old ones"
    return [f"--save {args.save}: the disk has {_gb(free)} free here, too little for {needed}, so that saves will "
            f"fail; {remedy}"]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes < 1e11 else f"{num_bytes / 1e9:,.0f} GB"


def _tokenizer_notes(plan: Plan, weights: InitialWeights) -> list[str]:
    """Return notes if the tokenizer of the run or of its data is not the weights' tokenizer."""
    notes: list[str] = []
    prepared_with = ((read_meta(prefix) or {}).get("tokenizer_sha256") for prefix in plan.data.train)
    used = plan.tokenizer.fingerprint if plan.tokenizer is not None else next(filter(None, prepared_with), None)
    expected = _tokenizer_of(weights) if used is not None else None
    if used == expected:
        return notes
    if plan.tokenizer is not None:
        notes += check_tokenizer_fits(plan.tokenizer.ids, weights.model.config.hf_config,
                                      vocab_size=plan.model.vocab_size, where=f"--tokenizer {plan.args.tokenizer}",
                                      remedy="use the tokenizer of the weights")
    if used is not None and expected is not None:
        name = f"--tokenizer {plan.args.tokenizer}" if plan.tokenizer is not None else "the tokenizer of --train_data"
        notes.append(f"{name} is another file than the tokenizer of the weights ({weights.origin.folder}): make sure "
                     "that both have the same tokens")
    return notes


def _tokenizer_of(weights: InitialWeights) -> str | None:
    """Return the fingerprint of the tokenizer that the weights were trained with; None if it is unknown."""
    if not isinstance(weights.source, HFFolder):
        return weights.source[1].tokenizer_fingerprint
    with contextlib.suppress(ConfigError):  # the run does not read this tokenizer
        found = find_hf_tokenizer(weights.source)
        return found.fingerprint if found is not None else None
    return None
