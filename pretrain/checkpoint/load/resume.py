"""Choose the checkpoint that a run resumes from before the process group exists, and check that they fit together."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, checkpoint_folders, newest_good
from pretrain.checkpoint.format.run_manifest import tokenizer_fingerprint
from pretrain.checkpoint.load.changes import changes_of, keep_schedule, schedule_for_length
from pretrain.checkpoint.load.init_from import branch_of, check_origin, check_same_branch, find_branch
from pretrain.checkpoint.load.same_data import (
    blend_note,
    check_same_data,
    check_same_tokenizer,
    evaluation_data_notes,
)
from pretrain.config.flags.arguments import OVERRIDES
from pretrain.config.flags.overrides import Change, named_overrides
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import Branch, check_same_parameters, reject_initial_values
from pretrain.config.validate import Plan
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.monitor.read_run_folder import newest_start


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from, or to branch from."""

    folder: Path
    manifest: Manifest
    warnings: list[str]  # about damaged newer checkpoints, and inputs that differ from those of the checkpoint
    plan: Plan  # of the run, with the settings that it keeps from the checkpoint
    other_data: str = ""  # how the training data differs from the checkpoint's, if --override data accepts it
    changes: tuple[Change, ...] = ()  # settings that --override changes
    branch: Branch | None = None  # None: the checkpoint belongs to the run folder

    @property
    def run(self) -> Path:
        """Folder of the run that wrote the checkpoint."""
        return self.folder.parent.parent


def checkpoints_folder(plan: Plan) -> Path:
    """Return the folder that holds the run's checkpoints."""
    return Path(plan.args.save) / "checkpoints"


def choose_resume(plan: Plan) -> Resume | None:
    """Return the checkpoint of the run folder that --resume selects: the newest good one, or None for step 0.

    Only manifests and file sizes are read. Later `agree_on_checkpoint.py` compares the hashes and reads the mirror, on
    all ranks. Raises ConfigError.
    """
    checkpoints, has_mirror = checkpoints_folder(plan), plan.args.checkpoint_mirror is not None
    if plan.args.resume == "never":
        reject_overwrite(checkpoint_folders(checkpoints))
        return None if plan.args.resume_from is None else _branch_if_found(plan)
    try:
        found = newest_good(checkpoints)
    except ConfigError:
        if not has_mirror:
            raise
        return None
    if found is not None:
        return make_resume(*found, plan)
    if plan.args.resume_from is not None:
        return _branch_if_found(plan)
    if plan.args.resume == "required" and not has_mirror and not checkpoints.is_dir():
        raise ConfigError("--resume required", problem=f"there is no checkpoint in {checkpoints}",
                          remedy="to begin at step 0, use --resume auto")
    return None


def _branch_if_found(plan: Plan) -> Resume | None:
    """Return the checkpoint of --resume_from. With a mirror, which may have later ones, it need not exist any more."""
    try:
        found = find_branch(plan.args)
    except ConfigError:
        if plan.args.checkpoint_mirror is None:
            raise
        return None
    return make_resume(*found, plan)


def reject_overwrite(found: Sequence[Path | str]) -> None:
    """Raise ConfigError if there are checkpoints that a new run would overwrite."""
    if found:
        raise ConfigError("--resume never", problem=f"a new run would overwrite {found[0]}",
                          remedy="choose another --save and --checkpoint_mirror")


def make_resume(folder: Path, manifest: Manifest, warnings: list[str], plan: Plan) -> Resume:
    """Return the checkpoint with all warnings. Raises ConfigError if the run `plan` cannot continue from it."""
    branch = None if folder.parent.absolute() == checkpoints_folder(plan).absolute() else branch_of(folder, manifest)
    if plan.args.init_from is not None:
        check_origin(plan.args.init_from, folder, manifest)
    if plan.args.resume_from is not None and branch is None:
        check_same_branch(plan.args, folder, manifest)
    if manifest.weights_only:
        return Resume(folder, manifest, [*warnings, *_check_weights_only(manifest, plan, folder)], plan)
    return _continue(Resume(folder, manifest, warnings, plan, branch=branch))


def _continue(found: Resume) -> Resume:
    """Compare the run with a checkpoint that has its state. Returns it with warnings, changes, and its plan."""
    folder, manifest, named = found.folder, found.manifest, named_overrides(found.plan.args)
    changes = changes_of(manifest, found.plan, folder, named)
    plan = continued_length(found.plan, manifest, changes, named)
    plan, schedule_changes = keep_schedule(plan, manifest, folder, named)
    if manifest.step >= plan.last_step:
        if found.branch is not None:
            raise ConfigError("--resume_from", problem=f"{folder} is at step {manifest.step} of {plan.last_step}",
                              remedy="give more --train_steps")
        _reject_other_evaluation_data(plan, manifest.step)
    if manifest.step > plan.last_step:
        flag = "--exit_step" if plan.last_step < plan.train_steps else \
            "--train_steps" if plan.args.train_tokens is None else "--train_tokens"
        found = replace(found, warnings=[*found.warnings, f"{folder} is beyond the last step of the run, which is "
                                         f"{plan.last_step} ({flag}): there is nothing to train"])
    other_data = check_same_data(manifest, plan, folder)
    if other_data:
        changes.append(Change("data", plan.data.train_flag, manifest.data_fingerprint,
                              plan.datasets["train"].fingerprint))
    other_tokenizer = check_same_tokenizer(manifest, plan, folder)
    if other_tokenizer and "data" in named:
        changes.append(Change("data", "--tokenizer", manifest.tokenizer_fingerprint, tokenizer_fingerprint(plan)))
    named_changes = tuple(change for change in (*changes, *schedule_changes) if change.name in named)
    notes = [other_data, blend_note(manifest, plan, folder), other_tokenizer,
             *evaluation_data_notes(plan, found.run), _batch_note(changes, named, folder),
             *_changed_flag_notes(plan, found.run)]
    plan = replace(plan, notes=(*plan.notes, *_override_notes(plan, manifest, named, named_changes)),
                   overrides=(*manifest.overrides, *(change.record(manifest.step) for change in named_changes)),
                   lineage=(*manifest.lineage, *([found.branch.record()] if found.branch else [])))
    return replace(found, warnings=[*found.warnings, *filter(None, notes)], plan=plan, other_data=other_data,
                   changes=named_changes)


def continued_length(plan: Plan, manifest: Manifest, changes: Sequence[Change], named: frozenset[str]) -> Plan:
    """Return the plan with the steps that --train_tokens leaves after the global batch size was changed.

    Its learning-rate schedule is planned for these steps. Raises ConfigError if --override schedule asks for a schedule
    that does not fit them.
    """
    batches = [change.record(0) for change in changes] + manifest.overrides
    if plan.args.train_tokens is None or not any(each["name"] == "batch" for each in batches):
        return plan
    length = replace(plan.length, steps_before=manifest.step,
                     samples_before=manifest.consumed_samples - plan.args.first_sample)
    length = replace(length, train_steps=max(length.steps_of(plan.args.train_tokens), manifest.step))
    plan = replace(plan, length=length)
    try:
        return schedule_for_length(plan)
    except ConfigError:
        if "schedule" in named:
            raise
        return plan  # the schedule of the checkpoint remains


def _override_notes(plan: Plan, manifest: Manifest, named: frozenset[str],
                    changes: Sequence[Change]) -> list[str]:
    """Return a note for each change, and for each name that changes nothing now and has changed nothing before.

    A requeued job repeats its command: its checkpoint has the new values then, and there is nothing to say.
    """
    notes = [f"--override {change.name}: from step {manifest.step + 1} on, {change.setting} is {change.now}; it was "
             f"{change.before}" for change in changes if change.name != "data"]
    idle = named - {change.name for change in changes} - {each["name"] for each in manifest.overrides}
    if plan.args.allow_other_data and not any("data" in text.split(",") for text in plan.args.override or []):
        idle -= {"data"}
    return notes + [f"--override {name} has no effect: {OVERRIDES[name]} is the same as in the checkpoint"
                    for name in sorted(idle)]


def _check_weights_only(manifest: Manifest, plan: Plan, folder: Path) -> list[str]:
    """Return warnings about a checkpoint of weights alone, with which the run begins at step 0. Raises ConfigError."""
    if plan.args.resume == "required":
        raise ConfigError("--resume required", problem=f"{folder} holds weights alone, and no state of a run",
                          remedy="to begin at step 0 with these weights, use --resume auto")
    reject_initial_values(plan.args, f"the run begins with the weights of {folder}")
    saved = model_config_from(manifest.model, f"{folder / MANIFEST}: model")
    return check_same_parameters(saved, plan.model, folder=folder, model=plan.args.model,
                                 overrides=plan.args.model_overrides)


def same_layout(saved: Layout, current: Layout) -> bool:
    """Return whether DeepSpeed can read the files itself; otherwise each rank reads the fragments that it needs."""
    names = ("world_size", "data_parallel_size", "pipeline_stages", "tensor_parallel_size", "sequence_parallel_size",
             "expert_parallel_size", "zero_stage", "precision", "grad_accum_dtype", "optimizer")
    # offload to CPU and offload to NVMe write the same files; without offload the optimizer class and its files differ
    same_offload = (saved.offload_optimizer == "none") == (current.offload_optimizer == "none")
    return same_offload and all(getattr(saved, name) == getattr(current, name) for name in names)


def _reject_other_evaluation_data(plan: Plan, step: int) -> None:
    """Raise ConfigError if a complete run has validation or test data that its last start did not have.

    A complete run evaluates nothing, so the data would be ignored. Without a readable run.json nothing is compared.
    """
    save, recorded = Path(plan.args.save), None
    with contextlib.suppress(ConfigError):
        recorded = newest_start(save).get("data")
    own = dict((*plan.data.valid, *plan.data.test))
    for name, dataset in plan.datasets.items():
        if name == "train" or not isinstance(recorded, dict) or recorded.get(name) == dataset.fingerprint:
            continue
        prefix, split = own.get(name), name.partition("/")[0]
        data = f"--data {prefix}" if prefix else f"--split {split}"
        raise ConfigError(f"--{split}_data {prefix}" if prefix else f"--split {plan.args.split}",
                          problem=f"the run is complete ({step} of {plan.last_step} steps are done), so it would not "
                          f"evaluate this {name} data, which its last start did not have",
                          remedy=f"python tools/evaluate.py {save} {data} evaluates it")


def _changed_flag_notes(plan: Plan, run: Path) -> list[str]:
    """Return notes on flags that may differ from those of the run's last start."""
    notes = []
    with contextlib.suppress(ConfigError):
        saved, current = newest_start(run)["flags"], plan.args
        for name, effect in (("seq_length_schedule", ""),
                             ("first_sample", "; it has no effect: the run continues after its checkpoint's samples")):
            values = [saved.get(name) or None, getattr(current, name) or None]
            if values[0] != values[1]:
                notes.append(f"--{name} was {values[0] or 'not given'} at the run's last start, and is "
                             f"{values[1] or 'not given'} now{effect}")
    return notes


def _batch_note(changes: Sequence[Change], named: frozenset[str], folder: Path) -> str:
    """Return a note if the global batch size changes and --override batch is not given."""
    return "" if "batch" in named else "".join(
        f"the global batch size was {change.before} in {folder.name}, and is {change.now} now; --override batch "
        "records this as intended" for change in changes if change.name == "batch")
