"""One rank of test_recomputation.py: train with micro-batches that are computed again, and with ranks that lie.

A fault of a case: {"rank", "layer" (name), "direction" ("forward" or "backward"), "every" (calls; 1: constantly)}.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from pretrain.config.plan import Plan
from pretrain.distributed.collectives import gather
from pretrain.engine.attachments import attachments
from pretrain.engine.recipe import router_values
from pretrain.engine.steps import grad_norm, open_loader, train_batch
from pretrain.engine.update_guard import guard_updates
from pretrain.engine.update_statistics import NoiseScale
from pretrain.errors import CorruptionError
from pretrain.extensions.replay.recompute import Recomputation
from pretrain.monitor.read_run_folder import read_rows
from pretrain.monitor.write_run_folder import RunFolder
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, state_hash
from tests.support.callback_runs import run_of
from tests.support.cases_loop import each_case


def train(engine: deepspeed.DeepSpeedEngine, plan: Plan, steps: int, interval: int) -> dict[str, Any]:
    """Train; return losses, norms, hashes of all states, the error, and the seconds of comparisons and steps."""
    folder = RunFolder(Path(plan.args.save), active=dist.get_rank() == 0)
    run = run_of(plan, engine, folder=folder)
    compared = Recomputation(interval)
    if interval:
        compared.start(run)
        attachments(engine).update.add(compared)
    loader, error = open_loader(engine, plan, "train"), ""
    rows: dict[str, Any] = {"loss": [], "grad_norm": [], "guard": []}
    guard_updates(engine, lambda loss, norm: bool(rows["guard"].append((float(loss), float(norm)))))
    seconds, step_s, before = [], [], compared.before_update

    def timed() -> None:
        began = time.perf_counter()
        before()
        seconds.append(time.perf_counter() - began)

    compared.before_update = timed  # type: ignore[method-assign]
    for step in range(1, steps + 1):
        began = time.perf_counter()
        run.step = step
        if interval:
            compared.before_step(run, [])
        try:
            rows["loss"].append(float(train_batch(engine, loader.step(plan.length.samples_after(step - 1)))))
        except CorruptionError as found:
            error = str(found)
            break
        rows["grad_norm"].append(grad_norm(engine))
        step_s.append(time.perf_counter() - began)
    loader.close()
    rows |= {"routers": router_values(engine, plan.model.num_layers), "random": int(torch.get_rng_state().sum())}
    noise_scale = attachments(engine).update.find(NoiseScale)
    rows["noise_scale"] = None if noise_scale is None else noise_scale.value()
    return {**rows, "state": "" if error else state_hash(engine), "error": error, "compared": len(seconds),
            "compare_s": statistics.median(seconds or [0]), "step_s": statistics.median(step_s or [0]),
            "recomputes": attachments(engine).recomputes}


def equal(case: Case) -> dict[str, Any]:
    """Train without and with comparisons in each step."""
    results = []
    for interval in (0, 1):
        torch.manual_seed(0)
        plan = plan_of(case)
        engine = engine_of(plan)
        results.append(gather(train(engine, plan, plan.train_steps, interval)))
        end(engine)
    return {"without": results[0], "with": results[1]}


def healthy(case: Case) -> dict[str, Any]:
    """Train with a comparison in each step."""
    plan = plan_of(case)
    engine = engine_of(plan)
    result = train(engine, plan, plan.train_steps, 1)
    end(engine)
    return result


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
        ctx.is_wrong = is_wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (_with_error(grads[0]) if ctx.is_wrong else grads[0]), None


def _with_error(x: torch.Tensor) -> torch.Tensor:
    wrong = x.clone()
    wrong.view(-1)[0] = wrong.view(-1)[0] * 1.125 + 0.125
    return wrong


def lie(engine: deepspeed.DeepSpeedEngine, fault: dict[str, Any]) -> None:
    """Make a layer of one rank compute wrongly, if this rank has it."""
    layer = dict(engine.module.named_modules()).get(fault["layer"])
    if dist.get_rank() != fault["rank"] or layer is None:
        return
    calls = 0

    def is_wrong() -> bool:
        nonlocal calls
        calls += 1
        return calls % fault["every"] == 0

    if fault["direction"] == "forward":
        layer.register_forward_hook(lambda module, args, output: _with_error(output) if is_wrong() else output)
    else:
        layer.register_forward_pre_hook(lambda module, args: (_WrongGradient.apply(args[0], is_wrong()), *args[1:]))


def fault(case: Case) -> dict[str, Any]:
    """Train with a rank that lies. Returns its error and events."""
    plan = plan_of(case)
    engine = engine_of(plan)
    lie(engine, case["fault"])
    result = train(engine, plan, plan.train_steps, 1)
    folder = Path(plan.args.save)
    result |= {"errors": gather(result["error"]),
               "events": [row for row in read_rows(folder / "events.jsonl") if row["event"] == "recomputation"]}
    end(engine)
    return result


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
