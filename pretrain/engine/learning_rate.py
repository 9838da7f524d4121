"""Set the learning rate of an engine by hand, for measurements that do not follow the run's schedule."""

from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan


def peak_learning_rate(plan: Plan) -> float:
    """Return the peak learning rate of the run: that of the schedule, or that of the JSON's optimizer."""
    if plan.schedule is not None:
        return plan.schedule.peak
    return float(plan.ds_config["optimizer"]["params"]["lr"])


def set_learning_rate(engine: DeepSpeedEngine, lr: float) -> None:
    """Set the rate of the next step. Parameter groups with other rates, such as those of muP, keep their proportions.

    The engine's schedule sets the rates again after each step, so that this must be called before each step.
    """
    groups = engine.optimizer.param_groups
    initial = [group.get("initial_lr", group["lr"]) for group in groups]
    for group, own in zip(groups, initial, strict=True):
        group["lr"] = lr * (own / initial[0] if initial[0] > 0 else 1.0)
