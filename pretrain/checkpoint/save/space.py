"""Predict the size of a run's next checkpoint, to check the free disk space."""

from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest, manifests_or_errors
from pretrain.config.validate import Plan


def next_checkpoint_bytes(plan: Plan, checkpoints: Path) -> int:
    """Return the size in bytes of the next checkpoint.

    This is the size of the newest complete checkpoint if it has the plan's ZeRO stage and precision, else an estimate.
    """
    newest = next((found for _, found in manifests_or_errors(checkpoints) if isinstance(found, Manifest)), None)
    if newest is not None and not newest.weights_only and \
            (newest.zero_stage, newest.precision) == (plan.layout.zero_stage, plan.layout.precision):
        return sum(record.bytes for record in newest.files.values())
    return plan.layout.checkpoint_bytes(plan.model.num_parameters())
