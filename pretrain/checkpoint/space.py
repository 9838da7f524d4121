"""How much room a checkpoint takes."""

from pathlib import Path

from pretrain.check import Plan
from pretrain.checkpoint.manifest import Manifest, judged_folders

# fp32 optimizer states of each parameter, by the optimizer's name in lower case; of another one: two, as Adam's
_STATES = {"adam": 2, "adamw": 2, "lion": 1, "adagrad": 1, "muon": 1}


def checkpoint_bytes(plan: Plan, checkpoints: Path) -> int:
    """What the next checkpoint will take: as much as the newest one, or else what its tensors come to.

    An estimate: fp32 weights, optimizer states and, but for ZeRO-3, the weights that the model computes with.
    """
    newest = next((found for _, found in judged_folders(checkpoints) if isinstance(found, Manifest)), None)
    if newest is not None and (newest.zero_stage, newest.precision) == (plan.zero_stage, plan.precision):
        return sum(record.bytes for record in newest.files.values())
    optimizer = plan.ds_config["optimizer"]
    states = _STATES.get(optimizer["type"].lower(), 2)
    if optimizer["type"].lower() == "sgd":
        states = 1 if optimizer.get("params", {}).get("momentum") else 0
    in_fp32 = plan.precision == "fp32"
    has_masters = not (in_fp32 and plan.zero_stage == 0)
    computed_with = 0 if plan.zero_stage == 3 else 4 if in_fp32 else 2
    return plan.model.num_parameters() * (4 * (has_masters + states) + computed_with)
