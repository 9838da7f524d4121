"""Size of a run's next checkpoint, for checks of free disk space."""

from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest, manifests_or_errors
from pretrain.config.checkpoint_size import checkpoint_bytes
from pretrain.config.layout import layout_of_plan
from pretrain.config.validate import Plan


def next_checkpoint_bytes(plan: Plan, checkpoints: Path) -> int:
    """Bytes of the newest complete checkpoint if it has the plan's ZeRO stage and precision; else an estimate."""
    newest = next((found for _, found in manifests_or_errors(checkpoints) if isinstance(found, Manifest)), None)
    if newest is not None and (newest.zero_stage, newest.precision) == (plan.zero_stage, plan.precision):
        return sum(record.bytes for record in newest.files.values())
    return checkpoint_bytes(layout_of_plan(plan, device_kind="cpu"), plan.model.num_parameters())
