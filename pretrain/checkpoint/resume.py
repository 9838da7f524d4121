"""Which checkpoint a run goes on from, judged before a process group forms."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.check import Plan
from pretrain.checkpoint.manifest import Manifest, manifest_of, newest_whole
from pretrain.errors import ConfigError


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from."""

    folder: Path
    manifest: Manifest
    warnings: list[str]  # newer checkpoints that are damaged, and inputs that differ from the run that saved


def choose_resume(plan: Plan) -> Resume | None:
    """The newest whole checkpoint of the run folder, as --resume asks; None: begin at step 0. Raises ConfigError."""
    checkpoints = Path(plan.args.save) / "checkpoints"
    found = newest_whole(checkpoints)
    if plan.args.resume == "never":
        if found is None:
            return None
        raise ConfigError("--resume never", found=f"{found[0]}, which a new run would overwrite",
                          expected="a run folder without checkpoints", remedy="choose another --save")
    if found is None:
        if plan.args.resume == "required":
            raise ConfigError("--resume required", found=f"no checkpoint in {checkpoints}",
                              expected="at least one", remedy="--resume auto begins at step 0")
        return None
    folder, manifest, complaints = found
    check_layout(manifest, plan, folder)
    changes = changed_inputs(manifest, plan)
    if changes:
        complaints = [*complaints, f"{', '.join(changes)} differ from the run that saved {folder.name}"]
    return Resume(folder, manifest, complaints)


def check_layout(manifest: Manifest, plan: Plan, folder: Path) -> None:
    """Refuse a resume that this version cannot do exactly: another layout or another model. Raises ConfigError."""
    pairs = {"world size": (manifest.world_size, plan.world_size),
             "ZeRO stage": (manifest.zero_stage, plan.zero_stage),
             "pipeline stages": (manifest.pipeline_stages, plan.pipeline_stages),
             "precision": (manifest.precision, plan.precision),
             "gradient accumulation dtype": (manifest.grad_accum_dtype, plan.grad_accum_dtype)}
    for name, (saved, now) in pairs.items():
        if saved != now:
            raise ConfigError(f"{folder}: {name}", found=f"{saved} in the checkpoint and {now} in this run",
                              expected="the same layout", remedy="resume with the layout that saved it")
    changed = sorted(key for key in manifest.model.keys() | plan.model.hf_config.keys()
                     if manifest.model.get(key) != plan.model.hf_config.get(key))
    if changed:
        key = changed[0]
        raise ConfigError(f"{folder}: model {key}", expected="the same model",
                          found=f"{manifest.model.get(key)!r} in the checkpoint and "
                                f"{plan.model.hf_config.get(key)!r} in this run", remedy="choose another --save")


def changed_inputs(manifest: Manifest, plan: Plan) -> list[str]:
    """What differs from the run that saved, and changes which samples come next: worth a warning, not a refusal."""
    now = manifest_of(plan, step=0, consumed_samples=0, versions={})
    return [name for name in ("seed", "seq_length", "data_fingerprint", "tokenizer_fingerprint")
            if getattr(manifest, name) != getattr(now, name)]
