"""One rank of the tests of --batch_schedule and --lr_schedule: train through a resume, next to a plain torch loop."""

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.model_of_run import initialization_of
from pretrain.config.plan import Plan
from pretrain.engine.steps import eval_batch, open_loader
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, steps
from tests.support.cases_loop import each_case


def ramp(case: Case) -> dict[str, Any]:
    """Train, evaluate and save in one layout, then resume with the JSON `resumed_config`, evaluate, and train."""
    plan, at = plan_of(case), case["saved_step"]
    engine = engine_of(plan)
    rows = steps(engine, plan, 0, at - 1)
    evaluated = [evaluate(engine, plan)]
    tail = steps(engine, plan, at - 1, at)  # the evaluation has not changed the accumulation steps
    folder = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                             consumed_samples=plan.length.samples_after(at), versions={}).folder
    end(engine)
    plan = plan_of({**case, "config": case["resumed_config"], "name": f"{case['name']}-resumed"})
    engine = engine_of(plan)
    steps(engine, plan, 0, 1)  # so that the load must replace weights and states, in the middle of an older stage
    load_checkpoint(engine, plan, folder, read_manifest(folder))
    evaluated.append(evaluate(engine, plan))
    resumed = steps(engine, plan, at, plan.train_steps)
    counted = engine.global_samples
    end(engine)
    return {**{key: rows[key] + tail[key] + resumed[key] for key in rows}, "evaluated": evaluated,
            "global_samples": counted, "reference": plain_torch(plan, case["sizes"], (at - 1, at))}


def evaluate(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> float:
    loader = open_loader(engine, plan, "valid")
    loss = float(eval_batch(engine, loader.step(0)))
    loader.close()
    return loss


def plain_torch(plan: Plan, sizes: list[int], evaluated_after: tuple[int, ...]) -> dict[str, Any]:
    """Train without DeepSpeed and without the loader: one backward pass for the complete global batch of each step.

    `sizes` are the batch sizes of all steps. The rates are from `plan.schedule`, which other tests compare with
    closed forms.
    """
    module = as_module(plan.model, plain_operators=True)
    initialize_parameters(module, plan.model, seed=plan.args.seed, how=initialization_of(plan.args))
    params, schedule = plan.ds_config["optimizer"]["params"], plan.schedule
    assert schedule is not None
    matrices, vectors = ([p for p in module.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": params["weight_decay"]},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=params["lr"], betas=tuple(params["betas"]), eps=params["eps"])
    result: dict[str, Any] = {"loss": [], "grad_norm": [], "lr": [], "evaluated": []}
    for step in range(len(sizes)):
        if step in evaluated_after:
            with torch.no_grad():
                result["evaluated"].append(float(mean_loss(module, plan, "valid", range(sizes[-1]))))
        loss = mean_loss(module, plan, "train", range(sum(sizes[:step]), sum(sizes[:step + 1])))
        optimizer.zero_grad()
        loss.backward()
        result["loss"].append(float(loss.detach()))
        result["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
        result["lr"].append(schedule(step))
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
    return result


def mean_loss(module: torch.nn.Module, plan: Plan, name: str, indices: range) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens of the samples."""
    samples = torch.from_numpy(plan.datasets[name].samples(indices).astype(np.int64))
    return F.cross_entropy(module(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
