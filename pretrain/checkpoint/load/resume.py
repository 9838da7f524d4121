"""Choose the checkpoint that a run resumes from before the process group exists, and check that they fit together."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, tokenizer_fingerprint
from pretrain.checkpoint.format.run_checkpoints import checkpoint_folders, newest_good, parse_head, read_manifest
from pretrain.checkpoint.load.changes import changes_of, continued_schedule
from pretrain.checkpoint.load.init_from import branch_of, check_origin, check_same_branch, find_branch
from pretrain.checkpoint.load.same_data import (
    adopted_data_note,
    blend_note,
    check_read_order,
    check_same_data,
    check_same_tokenizer,
    evaluation_data_notes,
)
from pretrain.checkpoint.save.retention import position_after
from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.flags.arguments import OVERRIDES, RunArguments
from pretrain.config.flags.check_flags import Change, named_overrides
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import Branch, check_same_parameters, reject_initial_values
from pretrain.config.plan import Plan, RunLength
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.monitor.read_run_folder import newest_start


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from, or to branch from."""

    folder: Path
    manifest: Manifest
    warnings: list[str]  # about damaged newer checkpoints, and inputs that differ from the checkpoint's
    plan: Plan  # the run's plan, with the settings that it keeps from the checkpoint
    other_data: str = ""  # how the training data differs from the checkpoint's, if --override data accepts it
    branch: Branch | None = None  # None: the checkpoint belongs to the run folder

    @property
    def run(self) -> Path:
        """Folder of the run that wrote the checkpoint."""
        return self.folder.parent.parent


FoundCheckpoint = tuple[Path, Manifest, list[str]]
"""a checkpoint, and lines about newer ones that cannot be used"""


def checkpoints_folder(plan: Plan) -> Path:
    """Return the folder that holds the run's checkpoints."""
    return Path(plan.args.save) / "checkpoints"


def choose_checkpoint(args: RunArguments, *, complete: bool = True) -> FoundCheckpoint | None:
    """Return the checkpoint that --resume selects: the newest good one of the run folder, or None for step 0.

    Without one in the run folder, this is the one of --resume_from, if the flag is given. Only manifests and file sizes
    are read. Later `agree_on_checkpoint.py` compares the hashes and reads the mirror, which may have later checkpoints,
    on all ranks. Without `complete`, the files' names and sizes are not read. Raises ConfigError.
    """
    checkpoints, has_mirror = Path(args.save) / "checkpoints", args.checkpoint_mirror is not None
    if args.resume == "never":
        reject_overwrite(checkpoint_folders(checkpoints))
    try:
        found = newest_good(checkpoints, read_manifest if complete else parse_head) if args.resume != "never" else None
        if found is not None or args.resume_from is not None:
            return found or find_branch(args, read_manifest if complete else parse_head)
    except ConfigError:
        if not has_mirror:
            raise
        return None
    if args.resume == "required" and not has_mirror and not checkpoints.is_dir():
        raise ConfigError("--resume required", problem=f"there is no checkpoint in {checkpoints}",
                          remedy="to begin at step 0, use --resume auto")
    return None


def reject_overwrite(found: Sequence[Path | str]) -> None:
    """Raise ConfigError if there are checkpoints that a new run would overwrite."""
    if found:
        raise ConfigError("--resume never", problem=f"a new run would overwrite {found[0]}",
                          remedy="choose another --save and --checkpoint_mirror")


def make_resume(folder: Path, manifest: Manifest, warnings: list[str], plan: Plan, *,
                with_record: bool = True) -> Resume:
    """Return the checkpoint with all warnings. Raises ConfigError if the run `plan` cannot continue from it.

    Args:
        with_record: compare the run with run.json, too, whose size grows with the number of hosts.
    """
    branch = None if folder.parent.absolute() == checkpoints_folder(plan).absolute() else branch_of(folder, manifest)
    if plan.args.init_from is not None:
        check_origin(plan.args.init_from, folder, manifest)
    if plan.args.resume_from is not None and branch is None:
        check_same_branch(plan.args, folder, manifest)
    if manifest.weights_only:
        return Resume(folder, manifest, [*warnings, *_check_weights_only(manifest, plan, folder)],
                      replace(plan, origin=manifest.origin_in(folder)))
    return _continue(folder, manifest, warnings, plan, branch, with_record=with_record)


def _continue(folder: Path, manifest: Manifest, warnings: list[str], plan: Plan, branch: Branch | None, *,
              with_record: bool) -> Resume:
    """Compare the run with a checkpoint that has its state."""
    run, named = folder.parent.parent, named_overrides(plan.args)
    consumed = position_after(folder.parent, manifest)
    check_read_order(manifest, plan, folder, consumed)
    allowed = named | ({"samples"} if branch is not None else set())  # a branch is a decision of its own
    changes = changes_of(manifest, plan, folder, allowed)
    _check_divisible(manifest, plan, folder)
    length = _continued_length(plan, manifest, changes)
    schedule = continued_schedule(plan, length, manifest, folder, named)
    nothing_left = _check_steps_left(plan, length, manifest, folder, branch, with_record=with_record)
    other_data = check_same_data(manifest, plan, folder, consumed)
    if other_data:
        changes.append(Change("data", plan.data.train_flag, manifest.data_fingerprint,
                              plan.datasets["train"].fingerprint))
    other_tokenizer = check_same_tokenizer(manifest, plan, folder)
    if other_tokenizer and "data" in named:
        changes.append(Change("data", "--tokenizer", manifest.tokenizer_fingerprint, tokenizer_fingerprint(plan)))
    named_changes = tuple(change for change in (*changes, *schedule.changes) if change.name in allowed)
    new_warnings = [nothing_left, other_data, blend_note(manifest, plan, folder), other_tokenizer,
                    *(evaluation_data_notes(plan, run) if with_record else ()), _batch_note(changes, named, folder),
                    *(_changed_flag_notes(plan, run) if with_record else ())]
    notes = [schedule.note, adopted_data_note(manifest, plan, consumed),
             *_override_notes(plan, manifest, named, named_changes)]
    continued = replace(plan, length=length, **schedule.of_plan(plan), notes=(*plan.notes, *filter(None, notes)),
                        overrides=(*manifest.overrides, *(change.record(manifest.step) for change in named_changes)),
                        lineage=(*manifest.lineage, *([branch.record()] if branch else [])),
                        origin=manifest.origin_in(folder))
    return Resume(folder, manifest, [*warnings, *filter(None, new_warnings)], continued, other_data, branch)


def _continued_length(plan: Plan, manifest: Manifest, changes: Sequence[Change]) -> RunLength:
    """Return the length of the run, with the steps that --train_tokens leaves after a change of the global batch."""
    batches = [change.record(0) for change in changes] + manifest.overrides
    if plan.args.train_tokens is None or not any(each["name"] == "batch" for each in batches):
        return plan.length
    length = replace(plan.length, steps_before=manifest.step,
                     samples_before=manifest.consumed_samples - plan.args.first_sample)
    return replace(length, train_steps=max(length.steps_of(plan.args.train_tokens), manifest.step))


def _check_steps_left(plan: Plan, length: RunLength, manifest: Manifest, folder: Path, branch: Branch | None, *,
                      with_record: bool) -> str:
    """Return a warning if the checkpoint is beyond the last step of the run, else "".

    Raises ConfigError for a branch without a step to train, and for evaluation data that a complete run would ignore.
    """
    last_step = length.last_step(plan.args.exit_step)
    if manifest.step >= last_step:
        if branch is not None:
            raise ConfigError("--resume_from", problem=f"{folder} is at step {manifest.step} of {last_step}",
                              remedy="give more --train_steps")
        if with_record:
            _reject_other_evaluation_data(plan, manifest.step, last_step)
    if manifest.step <= last_step:
        return ""
    flag = "--exit_step" if last_step < length.train_steps else \
        "--train_steps" if plan.args.train_tokens is None else "--train_tokens"
    return f"{folder} is beyond the last step of the run, which is {last_step} ({flag}): there is nothing to train"


def _override_notes(plan: Plan, manifest: Manifest, named: frozenset[str],
                    changes: Sequence[Change]) -> list[str]:
    """Return a note for each change, and for each name that changes nothing now and has changed nothing before.

    A requeued job repeats its command: its checkpoint has the new values then, and there is nothing to say.
    """
    notes = [f"{f'--override {change.name}: ' if change.name in named else ''}from step {manifest.step + 1} on, "
             f"{change.setting} is {change.now}; it was {change.before}" for change in changes if change.name != "data"]
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
    return not _different_settings(saved, current)


def _different_settings(saved: Layout, current: Layout) -> list[str]:
    """Return the settings of the layout that determine which states are in which file, and that differ."""
    names = ("world_size", "data_parallel_size", "pipeline_stages", "tensor_parallel_size", "sequence_parallel_size",
             "expert_parallel_size", "zero_stage", "precision", "grad_accum_dtype", "optimizer")
    saved, current = (replace(each, grad_accum_dtype=each.grad_accum_dtype or each.precision)
                      for each in (saved, current))
    # offload to CPU and offload to NVMe write the same files; without offload the optimizer class and its files differ
    same_offload = (saved.offload_optimizer == "none") == (current.offload_optimizer == "none")
    return [name for name in names if getattr(saved, name) != getattr(current, name)] + \
        ([] if same_offload else ["offload_optimizer"])


def _check_divisible(manifest: Manifest, plan: Plan, folder: Path) -> None:
    """Raise ConfigError if another layout would have to divide optimizer states that belong to complete matrices."""
    row = OPTIMIZERS[plan.layout.optimizer]
    different = _different_settings(manifest.layout, plan.layout)
    if row.divisible or not different:
        return
    name = different[0]
    values = [getattr(layout, name) for layout in (manifest.layout, plan.layout)]
    before, now = ("the default" if value is None else value for value in values)
    raise ConfigError(f"{folder}: {name}", problem=f"{before} in the checkpoint and {now} in this run; another layout "
                      f"cannot divide the states of {row.name}",
                      remedy="resume in the layout of the checkpoint, or begin with its weights: --init_from")


def _reject_other_evaluation_data(plan: Plan, step: int, last_step: int) -> None:
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
        if plan.data.module is not None:
            data = "--data PREFIX"
        where = f"--split {plan.args.split}" if plan.data.module is None else plan.data.train_flag
        raise ConfigError(f"--{split}_data {prefix}" if prefix else where,
                          problem=f"the run is complete ({step} of {last_step} steps are done), so it would not "
                          f"evaluate this {name} data, which its last start did not have",
                          remedy=f"`ds-pretrain evaluate {save} {data}` evaluates it")


def _changed_flag_notes(plan: Plan, run: Path) -> list[str]:
    """Return notes on extensions and flags that may differ from the run's last start."""
    notes = []
    with contextlib.suppress(ConfigError):
        start, here = newest_start(run), {each.name for each in extensions()}
        notes += [f"the extension {name}, which the run's last start used, is not installed now"
                  for name in start.get("extensions") or () if name not in here]
        saved, current = start["flags"], plan.args
        for name, effect in (("seq_length_schedule", ""),
                             ("first_sample", "; it has no effect: the run continues after its checkpoint's samples"),
                             ("deterministic", "; the next losses differ in the last bits from those of a run without "
                                               "this change")):
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
