"""One rank of tests/distributed/test_skipped_updates.py: inject faults, and compare the run with a clean one.

The cases have the format of `worker.py`. A case also has "faults": nan_loss, inf_loss (with finite gradients),
nan_gradient (on the last rank), inf_gradient (on the first rank), or veto (of one rank).
"""

import hashlib
import math
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.engine.attachments import attachments
from pretrain.engine.steps import grad_norm, learning_rate, loss_scale, open_loader, train_batch
from pretrain.engine.update_guard import UpdateGuard, guard_updates, skipped_update
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, state_hash, weights_hash
from tests.support.cases_loop import each_case

BAD_RANK, BAD_MICRO_BATCH = 1, 0  # of 2 ranks and 2 micro-batches; in a pipeline, rank 1 is the last stage


class Faults:
    """Injects one fault into one micro-batch of one rank."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.fault = ""
        self.asked: list[tuple[float, float]] = []  # arguments of `veto`
        self._micro_batch = self._gradient = 0
        module = engine.module
        if isinstance(engine, PipelineEngine):
            loss_fn = module.loss_fn
            module.loss_fn = lambda outputs, labels: self._change_loss(loss_fn(outputs, labels))
        else:
            module.register_forward_hook(lambda module, inputs, loss: self._change_loss(loss))
        parameter = next(p for name, p in module.named_parameters() if "mlp" in name)
        parameter.register_hook(self._change_gradient)

    def inject(self, fault: str) -> None:
        self.fault, self._micro_batch, self._gradient = fault, 0, 0

    def veto(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Reject the update on one rank; record the arguments."""
        self.asked.append((float(loss), float(norm)))
        return self.fault == "veto" and dist.get_rank() == BAD_RANK

    def _change_loss(self, loss: torch.Tensor) -> torch.Tensor:
        here = self._micro_batch == BAD_MICRO_BATCH and dist.get_rank() == BAD_RANK
        self._micro_batch += 1
        if here and self.fault == "nan_loss":
            return loss * math.nan
        if here and self.fault == "inf_loss":
            return loss + math.inf  # the gradient remains finite
        return loss

    def _change_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        bad = {("nan_gradient", BAD_RANK): math.nan, ("inf_gradient", 0): -math.inf}.get((self.fault, dist.get_rank()))
        self._gradient += 1
        if bad is None or self._gradient != BAD_MICRO_BATCH + 1:
            return None
        grad = grad.clone()
        grad.view(-1)[0] = bad
        return grad


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def snapshot(engine: deepspeed.DeepSpeedEngine, *, fp16_overflow: bool = False) -> list[Any]:
    """Return hashes of weights, optimizer states and schedule of all ranks; without the loss scale on an overflow."""
    schedule = hashlib.sha256(repr(sorted(engine.lr_scheduler.state_dict().items())).encode()).hexdigest()
    return [*everywhere([weights_hash(engine), schedule, learning_rate(engine)]),
            "" if fp16_overflow else state_hash(engine)]


def skip(case: Case) -> dict[str, Any]:
    """Train good steps; then train them again in a new engine, with a fault before each of them.

    Returns a row for each good step with the fault before it, the arguments of `veto` on each rank, and loss and norm
    of the updates that could be vetoed. The last step has zero gradients.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    guard_updates(engine)
    loader = open_loader(engine, plan, "train")
    samples, clean = plan.layout.global_batch_size, []
    for step in range(len(case["faults"]) + 1):
        clean.append([float(train_batch(engine, loader.step(step * samples))), grad_norm(engine), snapshot(engine)])
    end(engine)

    engine = engine_of(plan)
    faults = Faults(engine)
    guard_updates(engine, faults.veto if "veto" in case["faults"] else None)
    rows, veto_inputs = [], []
    for step, fault in enumerate(["", *case["faults"]]):
        row: dict[str, Any] = {"fault": fault}
        if fault:
            row |= faulty_step(engine, faults, fault, loader.step((step + 50) * samples))
            if fault == "veto":
                veto_inputs.append(row["reported"])
        good = [float(train_batch(engine, loader.step(step * samples))), grad_norm(engine), snapshot(engine)]
        veto_inputs.append(good[:2])
        row |= {"applied": everywhere(skipped_update(engine) is None), "next_is_equal": good == clean[step]}
        rows.append(row)
    micro_batches = loader.step(0)
    for _, (_, weights_BT) in micro_batches:
        weights_BT.zero_()
    train_batch(engine, micro_batches)
    result = {"rows": rows, "optimizer": type(engine.optimizer).__name__, "asked": everywhere(faults.asked[:-1]),
              "veto_inputs": veto_inputs,
              "zero": [grad_norm(engine), everywhere(skipped_update(engine) is None)]}
    loader.close()
    end(engine)
    return result


def faulty_step(engine: deepspeed.DeepSpeedEngine, faults: Faults, fault: str, batches: Any) -> dict[str, Any]:
    """Train a step with a fault, and return what it changed and what was reported."""
    overflow = engine.fp16_enabled() and "gradient" in fault
    before, skipped, scale = snapshot(engine, fp16_overflow=overflow), engine.skipped_steps, loss_scale(engine)
    faults.inject(fault)
    loss = float(train_batch(engine, batches))
    faults.inject("")
    update = skipped_update(engine)
    return {"reported": [loss, grad_norm(engine)], "scale": [scale, loss_scale(engine)],
            "unchanged": snapshot(engine, fp16_overflow=overflow) == before,
            "decided_late": attachments(engine).update.find(UpdateGuard).outcome is not None,
            "counted": everywhere(engine.skipped_steps - skipped),
            "skipped": everywhere([update.reason, update.is_bad] if update else None)}


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
