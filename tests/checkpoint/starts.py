"""Helpers: validate the start of a run, and write a checkpoint that has only a manifest."""

from dataclasses import replace
from pathlib import Path

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, manifest_of
from pretrain.checkpoint.load import same_data
from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.load.start import Start, check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import cpu_device
from tests.support.launch import ROOT


def start_run(run: Path, *flags: str) -> Start:
    """Validate the start of a run in this folder, as check_config.py, the launchers and the ranks do."""
    args = parse_arguments(["--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json"), "--model", "tiny",
                            "--model_overrides", "vocab_size=256", "--train_steps", "50", "--save", str(run), *flags])
    return check_start(args, world_size=1, device=cpu_device())


def resumed(start: Start) -> Resume:
    """Return the checkpoint that a run resumes from."""
    assert start.resume is not None
    return start.resume


def write_checkpoint(plan: Plan, **changes: object) -> Manifest:
    """Write a checkpoint at sample 80 that has only a manifest."""
    folder = Path(plan.args.save) / "checkpoints" / "global_step10"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = replace(manifest_of(plan, step=10, consumed_samples=80, versions={}), **changes)
    (folder / MANIFEST).write_text(manifest.to_json())
    return manifest


def hash_data(plan: Plan) -> None:
    same_data.hash_if_fast(plan.datasets["train"].sources[0], seconds=600)
