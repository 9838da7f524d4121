"""One rank of tests/distributed/test_skipped_updates.py: inject faults, and compare the run with a clean one.

The cases have the format of `worker.py`. A case also has "faults": a list of names of `FAULTS`.
"""

import hashlib
import math
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.engine.steps import grad_norm, learning_rate, loss_scale, train_batch
from pretrain.engine.update_guard import guard_updates, skipped_update
from tests.distributed.workers.worker import Case, end, engine_of, loader_of, plan_of, state_hash, weights_hash
from tests.support.cases_loop import each_case

FAULTS = ("nan_loss", "inf_loss", "nan_gradient", "inf_gradient", "veto")
BAD_RANK, BAD_MICRO_BATCH = 1, 1  # of 2 ranks and 2 micro-batches; in a pipeline, rank 1 is the last stage


class Faults:
    """Injects one fault into one micro-batch of one rank."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.fault, self.asked = "", []
        self._micro_batch = self._gradient = 0
        module = engine.module
        if isinstance(engine, PipelineEngine):
            loss_fn = module.loss_fn
            module.loss_fn = lambda outputs, labels: self._change_loss(loss_fn(outputs, labels))
        else:
            module.register_forward_hook(lambda module, inputs, loss: self._change_loss(loss))
        # the first block's: in a pipeline, that of the first stage receives its gradient from the second one
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
        here = self._gradient == BAD_MICRO_BATCH and dist.get_rank() == BAD_RANK
        self._gradient += 1
        if here and self.fault in ("nan_gradient", "inf_gradient"):
            grad = grad.clone()
            grad.view(-1)[0] = math.nan if self.fault == "nan_gradient" else -math.inf
            return grad
        return None


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
    """Train good steps; then train them again in a new engine, with a fault before each of them."""
    plan = plan_of(case)
    engine = engine_of(plan)
    guard_updates(engine)
    loader = loader_of(engine, plan)
    samples, clean = plan.layout.global_batch_size, []
    for step in range(len(case["faults"]) + 1):
        loss = float(train_batch(engine, loader.step(step * samples)))
        clean.append([loss, grad_norm(engine), snapshot(engine)])
    end(engine)

    engine = engine_of(plan)
    faults = Faults(engine)
    guard_updates(engine, faults.veto if "veto" in case["faults"] else None)
    rows = []
    for step, fault in enumerate(["", *case["faults"]]):
        row: dict[str, Any] = {"fault": fault}
        if fault:
            overflow = plan.layout.precision == "fp16" and "gradient" in fault
            before, skipped, scale = snapshot(engine, fp16_overflow=overflow), engine.skipped_steps, loss_scale(engine)
            faults.inject(fault)
            row["bad_loss"] = float(train_batch(engine, loader.step((step + 50) * samples)))
            row["bad_norm"] = grad_norm(engine)
            faults.inject("")
            reason = skipped_update(engine)
            row |= {"unchanged": snapshot(engine, fp16_overflow=overflow) == before,
                    "counted": everywhere(engine.skipped_steps - skipped),
                    "reason": everywhere([reason.reason, reason.is_bad] if reason else None),
                    "scale": [scale, loss_scale(engine)]}
        loss = float(train_batch(engine, loader.step(step * samples)))
        row |= {"next": [loss, grad_norm(engine), snapshot(engine)] == clean[step],
                "applied": everywhere(skipped_update(engine)), "loss": loss}
        rows.append(row)
    result = {"rows": rows, "optimizer": type(engine.optimizer).__name__, "asked": everywhere(faults.asked)}
    loader.close()
    end(engine)
    return result


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
