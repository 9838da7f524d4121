"""One pipeline engine that trains with 1F1B or ZB-H1, as a baseline.

The main function of its processes never returns.
"""

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.bench.baselines.this_project import training_loader
from pretrain.bench.baselines.zero_bubble import ZeroBubble
from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.request_loop import RequestLoop
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import build_engine, deepspeed_output
from pretrain.engine.steps import grad_norm, train_batch
from pretrain.memory.measure.cpu_step_peak import StepPeak


def two_schedules(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train with the schedule and the number of micro-batches that a request has: "zero_bubble", "micro_batches".

    All steps have the same samples, and the learning rate is 0. So all steps with the same number of micro-batches
    have the same gradients, whatever the schedule.
    """
    with deepspeed_output("error"):
        init_process_group(running_environment())
        plan = job.plan()
        engine = build_engine(plan)
    _keep_weights(engine)
    loader = training_loader(plan)
    batch = loader.step(0)
    loader.close()
    zero_bubble = ZeroBubble(engine)

    def train_step(micro_batches: int, *, on: bool) -> torch.Tensor:
        zero_bubble.switch(on=on)
        return train_batch(engine, batch[:micro_batches])

    counts: list[int] = job.option("micro_batches")
    train_step(counts[0], on=False)  # the first step allocates the states of the optimizer
    peaks = {f"{micro_batches} {on}": _peak_bytes(engine, lambda: train_step(micro_batches, on=on))  # noqa: B023
             for micro_batches, on in itertools.product(counts, (False, True))}
    requests.report_build(parameters=sum(weight.numel() for weight in engine.module.parameters()), peaks=peaks)
    norms: list[float] = []

    def take_norms() -> dict[str, Any]:
        taken = {"grad_norms": norms.copy()}
        norms.clear()
        return taken

    while True:
        loss = train_step(requests.request["micro_batches"], on=requests.request["zero_bubble"])
        norms.append(grad_norm(engine))
        requests.after_step(loss, figures=take_norms)


def _keep_weights(engine: PipelineEngine) -> None:
    """Set the learning rate to 0, so that the optimizer works as usual and no step changes the weights."""
    engine.lr_scheduler = None
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0


def _peak_bytes(engine: PipelineEngine, train_step: Callable[[], object]) -> int | None:
    """Return the peak of all tensors on this rank during a step; None on a CPU without jemalloc's counters."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        train_step()
        return torch.cuda.max_memory_allocated()
    peak = StepPeak()
    peak.begin(engine)
    train_step()
    peak.end()
    return peak.peak_bytes
