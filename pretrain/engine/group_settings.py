"""Keep this run's settings of the optimizer's parameter groups when a checkpoint is loaded."""

from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch.optim.lr_scheduler import LambdaLR

from pretrain.engine.attachments import attachments

# keys of a parameter group; "lr" follows from "initial_lr" and the schedule
_SETTINGS = ("initial_lr", "weight_decay", "eps")
_CYCLED = ("betas", "momentum")  # DeepSpeed's OneCycle changes them in each step
_ONE_CYCLE = ("onecycle", "1cycle")


def group_settings(engine: DeepSpeedEngine, ds_config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of a new engine's parameter groups: those of this run, with the multipliers of muP."""
    is_cycled = str(ds_config.get("scheduler", {}).get("type", "")).lower() in _ONE_CYCLE
    names = _SETTINGS if is_cycled else (*_SETTINGS, *_CYCLED)
    return [{name: group[name] for name in names if name in group} for group in _groups(engine)]


def restore_settings(engine: DeepSpeedEngine) -> None:
    """Set this run's settings again after a checkpoint was loaded, and the rates that the schedule has at its step.

    Loading replaces the settings by the checkpoint's. Where they are the same, this changes nothing.
    """
    for group, own in zip(_groups(engine), attachments(engine).group_settings, strict=True):
        group.update(own)
    scheduler = engine.lr_scheduler
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in _groups(engine)]
        rates = [base * rate(scheduler.last_epoch) for base, rate in
                 zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    elif scheduler is not None and scheduler.last_batch_iteration >= 0:  # a class of DeepSpeed's lr_schedules.py
        rates = scheduler.get_lr()
    else:
        return
    for group, rate in zip(_groups(engine), rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _groups(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer.param_groups
