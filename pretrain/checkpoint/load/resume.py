"""Choose the checkpoint that a run resumes from before the process group exists, and check that they fit together."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_folders,
    newest_good,
    scheduler_source,
)
from pretrain.checkpoint.load.init_from import check_origin
from pretrain.checkpoint.load.same_data import (
    blend_note,
    check_same_data,
    check_same_tokenizer,
    evaluation_data_notes,
)
from pretrain.config.initialization import initialization_of, reject_initial_values
from pretrain.config.layout import Layout
from pretrain.config.saved_model import check_same_parameters
from pretrain.config.validate import Plan
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.model.init_methods import Initialization
from pretrain.monitor.read_run_folder import newest_start

_LOSS_FLAGS = ("label_smoothing", "z_loss")


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from."""

    folder: Path
    manifest: Manifest
    warnings: list[str]  # about damaged newer checkpoints, and inputs that differ from those of the checkpoint
    other_data: str = ""  # how the training data differs from the checkpoint's, if --allow_other_data accepts it


def checkpoints_folder(plan: Plan) -> Path:
    """Return the folder that holds the run's checkpoints."""
    return Path(plan.args.save) / "checkpoints"


def choose_resume(plan: Plan) -> Resume | None:
    """Return the checkpoint of the run folder that --resume selects: the newest good one, or None for step 0.

    Only manifests and file sizes are read. Later `agree.py` compares the hashes and reads the mirror, on all ranks.
    Raises ConfigError.
    """
    checkpoints, has_mirror = checkpoints_folder(plan), plan.args.checkpoint_mirror is not None
    if plan.args.resume == "never":
        reject_overwrite(checkpoint_folders(checkpoints))
        return None
    try:
        found = newest_good(checkpoints)
    except ConfigError:
        if not has_mirror:
            raise
        return None
    if found is None:
        if plan.args.resume == "required" and not has_mirror and not checkpoints.is_dir():
            raise ConfigError("--resume required", problem=f"there is no checkpoint in {checkpoints}",
                              remedy="to begin at step 0, use --resume auto")
        return None
    return make_resume(*found, plan)


def reject_overwrite(found: Sequence[Path | str]) -> None:
    """Raise ConfigError if there are checkpoints that a new run would overwrite."""
    if found:
        raise ConfigError("--resume never", problem=f"a new run would overwrite {found[0]}",
                          remedy="choose another --save and --checkpoint_mirror")


def make_resume(folder: Path, manifest: Manifest, warnings: list[str], plan: Plan) -> Resume:
    """Return the checkpoint with all warnings. Raises ConfigError if the run `plan` cannot resume from it."""
    if plan.args.init_from is not None:
        check_origin(plan.args.init_from, folder, manifest)
    if manifest.weights_only:
        return Resume(folder, manifest, [*warnings, *_check_weights_only(manifest, plan, folder)])
    _check_can_resume(manifest, plan, folder)
    if manifest.step >= plan.last_step:
        _reject_other_evaluation_data(plan, manifest.step)
    other_data = check_same_data(manifest, plan, folder)
    notes = [other_data, blend_note(manifest, plan, folder), check_same_tokenizer(manifest, plan, folder),
             *evaluation_data_notes(plan), _batch_note(manifest, plan, folder), *_changed_flag_notes(plan)]
    return Resume(folder, manifest, [*warnings, *filter(None, notes)], other_data)


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
    names = ("world_size", "data_parallel_size", "pipeline_stages", "zero_stage", "precision", "grad_accum_dtype",
             "optimizer")
    # offload to CPU and offload to NVMe write the same files; without offload the optimizer class and its files differ
    same_offload = (saved.offload_optimizer == "none") == (current.offload_optimizer == "none")
    return same_offload and all(getattr(saved, name) == getattr(current, name) for name in names)


def _check_can_resume(manifest: Manifest, plan: Plan, folder: Path) -> None:
    """Raise ConfigError if this run has settings that must equal those of the checkpoint. The layout may differ."""
    # the optimizer's settings are loaded with its state, so changes in the JSON would have no effect
    optimizer = plan.ds_config["optimizer"]
    _reject_change(folder, "optimizer", {
        f"optimizer {key}": (manifest.optimizer.get(key), optimizer.get(key)) for key in ("type", "params")})
    _reject_change(folder, "weight decay", {
        "--no_weight_decay": (manifest.no_weight_decay, sorted({*(plan.args.no_weight_decay or ())}))})
    # both determine the order of the samples: after a change, samples would be repeated or skipped
    _reject_change(folder, "seed and length", {"--seed": (manifest.seed, plan.args.seed),
                                               "--seq_length": (manifest.seq_length, plan.layout.seq_length)})
    # the same weights would compute something else
    _reject_change(folder, "document attention", {
        "--document_attention": (manifest.document_attention, plan.layout.document_attention)})
    # a scheduler cannot load the state of another scheduler
    _reject_change(folder, "source of the learning rate", {
        "scheduler of": (manifest.scheduler, scheduler_source(plan))})
    saved = replace(model_config_from(manifest.model, f"{folder / MANIFEST}: model"), **manifest.dropouts)
    _reject_change(folder, "model", {
        f"model {f.name}": (getattr(saved, f.name), getattr(plan.model, f.name))
        for f in fields(saved) if f.name != "hf_config"})
    initial, current = Initialization(**manifest.initialization), initialization_of(plan.args)
    _reject_change(folder, "initialization", {
        f"--{name}": (value, getattr(current, name)) for name, value in asdict(initial).items()})
    if plan.args.train_tokens is not None:
        _reject_change(folder, "batch, or --train_steps instead of --train_tokens", {
            "global batch size": (manifest.global_batch_size, plan.layout.global_batch_size)})


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


def _reject_change(folder: Path, what: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    """Raise ConfigError if a value of the checkpoint differs from this run's value. `what` names these values."""
    for name, (saved, current) in pairs.items():
        if saved != current:
            raise ConfigError(f"{folder}: {name}", problem=f"{saved} in the checkpoint and {current} in this run",
                              remedy=f"a resume needs the same {what}: use the saved value, or choose another --save")


def _changed_flag_notes(plan: Plan) -> list[str]:
    """Return notes on flags that may differ from those of the run's last start."""
    notes = []
    with contextlib.suppress(ConfigError):
        saved, current = newest_start(Path(plan.args.save))["flags"], plan.args
        for name, effect in (("seq_length_schedule", ""), *((name, "") for name in _LOSS_FLAGS),
                             ("first_sample", "; it has no effect: the run continues after its checkpoint's samples")):
            values = [saved.get(name) or None, getattr(current, name) or None]
            if values[0] != values[1]:
                notes.append(f"--{name} was {values[0] or 'not given'} at the run's last start, and is "
                             f"{values[1] or 'not given'} now{effect}")
    return notes


def _batch_note(manifest: Manifest, plan: Plan, folder: Path) -> str:
    """Return a note if the global batch size is not that of the checkpoint."""
    saved, current = manifest.global_batch_size, plan.layout.global_batch_size
    return f"the global batch size was {saved} in {folder.name}, and is {current} now" if saved != current else ""
