"""Which checkpoint a run goes on from, and whether it can: judged before a process group forms."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pretrain.check import Plan
from pretrain.checkpoint.manifest import MANIFEST, Manifest, manifest_of, newest_whole
from pretrain.checkpoint.mirror import newest_in_mirror
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from."""

    folder: Path
    manifest: Manifest
    warnings: list[str]  # newer checkpoints that are damaged, and inputs that differ from the run that saved


def checkpoints_of(plan: Plan) -> Path:
    return Path(plan.args.save) / "checkpoints"


def choose_resume(plan: Plan) -> Resume | None:
    """The newest checkpoint of the run folder by its manifest and sizes, as --resume asks; None: begin at step 0.

    What it holds is compared with the manifest later, by all ranks together (`agree.py`). Raises ConfigError.
    """
    checkpoints = checkpoints_of(plan)
    found = newest_whole(checkpoints)
    if plan.args.resume == "never":
        if found is None:
            return None
        raise ConfigError("--resume never", found=f"{found[0]}, which a new run would overwrite",
                          expected="a run folder without checkpoints", remedy="choose another --save")
    if found is None:
        mirror = plan.args.checkpoint_mirror
        if plan.args.resume == "required" and (mirror is None or newest_in_mirror(mirror) is None):
            raise ConfigError("--resume required", found=f"no checkpoint in {mirror or checkpoints}",
                              expected="at least one", remedy="--resume auto begins at step 0")
        return None
    return judged(*found, plan)


def judged(folder: Path, manifest: Manifest, complaints: list[str], plan: Plan) -> Resume:
    """The checkpoint as one to go on from. Raises ConfigError where `plan` cannot go on from it exactly."""
    check_continuity(manifest, plan, folder)
    changes = changed_inputs(manifest, plan)
    if changes:
        complaints = [*complaints, f"{', '.join(changes)} differ from the run that saved {folder.name}"]
    return Resume(folder, manifest, complaints)


def same_layout(manifest: Manifest, plan: Plan) -> bool:
    """Whether the engine can read its own files back; otherwise each rank picks what it needs out of them."""
    now = manifest_of(plan, step=0, consumed_samples=0, versions={})
    names = ("world_size", "data_parallel_size", "pipeline_stages", "zero_stage", "precision", "grad_accum_dtype")
    # CPU and NVMe hold the same; the device's own optimizer and the host's do not
    return manifest.optimizer["type"] == now.optimizer["type"] and all(
        getattr(manifest, name) == getattr(now, name) for name in names) and (
        manifest.offload_optimizer == "none") == (now.offload_optimizer == "none")


def check_continuity(manifest: Manifest, plan: Plan, folder: Path) -> None:
    """Refuse to go on where the result would be another run's. The layout may change. Raises ConfigError."""
    now = manifest_of(plan, step=0, consumed_samples=0, versions={})
    # the optimizer's settings come back with its state: other ones would have no effect
    _refuse_change(folder, "optimizer", {
        f"optimizer {key}": (manifest.optimizer.get(key), now.optimizer.get(key)) for key in ("type", "params")})
    # both say which samples come next: with others, some would come again and some never
    _refuse_change(folder, "seed and length", {"--seed": (manifest.seed, now.seed),
                                               "--seq_length": (manifest.seq_length, now.seq_length)})
    saved = model_config_from(manifest.model, f"{folder / MANIFEST}: model")
    _refuse_change(folder, "model", {
        f"model {f.name}": (getattr(saved, f.name), getattr(plan.model, f.name))
        for f in fields(saved) if f.name != "hf_config"})
    if plan.args.train_tokens is not None:
        _refuse_change(folder, "batch, or --train_steps instead of --train_tokens", {
            "global batch size": (manifest.global_batch_size, now.global_batch_size)})


def _refuse_change(folder: Path, what: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    for name, (saved, now) in pairs.items():
        if saved != now:
            raise ConfigError(f"{folder}: {name}", found=f"{saved} in the checkpoint and {now} in this run",
                              expected=f"the same {what}", remedy="go on as it was saved, or choose another --save")


def changed_inputs(manifest: Manifest, plan: Plan) -> list[str]:
    """What differs from the run that saved, and is allowed to: worth a warning."""
    now = manifest_of(plan, step=0, consumed_samples=0, versions={})
    return [name for name in ("data_fingerprint", "tokenizer_fingerprint", "global_batch_size")
            if getattr(manifest, name) != getattr(now, name)]
