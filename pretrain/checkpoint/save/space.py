"""How much room a checkpoint takes."""

from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest, judged_folders
from pretrain.config.layout import layout_of_plan
from pretrain.config.validate import Plan
from pretrain.memory.step_time.run_cost import checkpoint_bytes as bytes_of_layout


def checkpoint_bytes(plan: Plan, checkpoints: Path) -> int:
    """What the next checkpoint will take: as much as the newest one, or else what its tensors come to, an estimate."""
    newest = next((found for _, found in judged_folders(checkpoints) if isinstance(found, Manifest)), None)
    if newest is not None and (newest.zero_stage, newest.precision) == (plan.zero_stage, plan.precision):
        return sum(record.bytes for record in newest.files.values())
    return bytes_of_layout(layout_of_plan(plan, device_kind="cpu"), plan.model.num_parameters())
