"""One rank of the override tests: continue with new settings by hand, and by --override from a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from pretrain.checkpoint.format.fragments import base_optimizer
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.plan import Plan
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, start_of, state_hash, steps
from tests.support.cases_loop import each_case

AT, LAST = 2, 5  # steps before the checkpoint, and in total


def override(case: Case) -> dict[str, Any]:
    """Change settings of a live engine, and of a new engine that loads the checkpoint of the same step.

    The new engine then loads the checkpoint again, as a rollback does.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    before = steps(engine, plan, 0, AT)
    _save(engine, plan)
    untouched_plan = plan_of(case)
    _set_by_hand(engine)
    expected = steps(engine, plan, AT, LAST)
    expected_state = state_hash(engine)
    end(engine)
    resume = start_of({**case, "config": case["new_config"], "flags": case["new_flags"]}).resume
    assert resume is not None
    engine = engine_of(resume.plan)
    steps(engine, resume.plan, 0, 1)  # so that the load must replace weights and states
    result: dict[str, Any] = {"before": before, "expected": expected, "found": [], "same_plan": untouched_plan.schedule
                              == plan.schedule, "states": [expected_state], "notes": resume.plan.notes,
                              "overrides": resume.plan.overrides}
    for _ in range(2):
        load_checkpoint(engine, resume.plan, resume.folder, resume.manifest)
        result["found"].append(steps(engine, resume.plan, AT, LAST))
        result["states"].append(state_hash(engine))
    result["dropout_follows_seed"] = _dropout_state(engine, resume, seed=1) != _dropout_state(engine, resume, seed=2)
    end(engine)
    return result


def _dropout_state(engine: Any, resume: Resume, *, seed: int) -> list[int]:
    """Return the state of the random number generator after the checkpoint was loaded with another --seed."""
    plan = replace(resume.plan, args=replace(resume.plan.args, seed=seed))
    load_checkpoint(engine, plan, resume.folder, resume.manifest)
    return torch.get_rng_state().tolist()  # type: ignore[no-any-return]


def _save(engine: Any, plan: Plan) -> None:
    save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=AT,
                    consumed_samples=AT * plan.layout.global_batch_size, versions={})


def _set_by_hand(engine: Any) -> None:
    """Double the rate, change the schedule from cosine to linear, and change betas, epsilon and weight decay."""
    groups, scheduler = base_optimizer(engine).param_groups, engine.lr_scheduler
    for group in groups:
        if group["weight_decay"] > 0:
            group["weight_decay"] = 0.3
        group["betas"], group["eps"] = [0.8, 0.9], 1e-6
        if "initial_lr" in group:
            group["initial_lr"] *= 2
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [2 * rate for rate in scheduler.base_lrs]
        scheduler.lr_lambdas = [_linear] * len(groups)
        rates = [rate * _linear(scheduler.last_epoch) for rate in scheduler.base_lrs]
    else:  # DeepSpeed's WarmupLR
        scheduler.max_lrs = [2 * rate for rate in scheduler.max_lrs]
        scheduler.delta_lrs = scheduler.max_lrs
        rates = scheduler.get_lr()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _linear(step: int) -> float:
    """Return the factor of a rate that falls from the peak 2e-3 in step number 1 to a tenth of it in step LAST."""
    return 2e-3 * (0.1 + 0.9 * (1 - min(step / (LAST - 1), 1))) / 2e-3


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
