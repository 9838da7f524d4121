"""One rank of the tests of metrics: run `trainer.train` for each case, and observe its steps from outside."""

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pretrain import step_loop, trainer
from pretrain.distributed.collectives import gather
from pretrain.distributed.process import ROOT
from pretrain.distributed.world import running_environment
from pretrain.engine.steps import eval_batch, grad_norm, open_loader, train_batch
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from tests.distributed.workers.fake_services import install_fake_services
from tests.distributed.workers.worker import Case, end, engine_of, start_of
from tests.support.cases_loop import each_case

WAITS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__")


class Observer:
    """Observes the steps of a run. It computes norms from the full parameters, where a rank has them in fp32."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.param_norms: list[float] = []
        self.update_ratios: list[float] = []
        self.losses: list[tuple[float, float]] = []  # for each step: this rank's sum of losses, and of their weights
        self.waits: list[dict[str, int]] = []  # for each step: who waited for the device
        self._calls: Counter[str] = Counter()

    def train_batch(self, engine: Any, micro_batches: Any) -> torch.Tensor:
        if self.norms:
            self.waits.append(dict(self._calls))
        before = self._copy(engine)
        losses: list[Any] = []
        hook = engine.module.register_forward_hook(lambda module, inputs, loss: losses.append(loss))
        self._calls.clear()
        loss = train_batch(engine, micro_batches)
        calls = self._calls.copy()
        hook.remove()
        # the output of a PipelineModule is not the loss
        self.losses.append((sum(float(each) for each in losses if torch.is_tensor(each) and each.dim() == 0),
                            sum(float(weights_BT.sum()) for _, (_, weights_BT) in micro_batches)))
        self.norms.append(grad_norm(engine))
        if before is not None:
            after = self._copy(engine)
            self.param_norms.append(float(after.norm()))
            self.update_ratios.append(float((after - before).norm() / before.norm()))
        self._calls = calls  # continues until the next step
        return loss

    def _copy(self, engine: Any) -> Any:
        if engine.zero_optimization_stage() > 0 or (engine.pipeline_parallelism and engine.num_stages > 1):
            return None
        return torch.cat([weight.detach().double().flatten() for weight in engine.module.parameters()])

    def count(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the method of torch.Tensor, counting each call by a function of this project, itself or in torch."""
        def counted(*args: Any, **kwargs: Any) -> Any:
            stack = traceback.extract_stack(limit=8)[:-1]
            caller = next((frame for frame in reversed(stack) if "/torch/" not in frame.filename), stack[-1])
            if caller.filename.startswith(f"{ROOT}/pretrain/"):
                self._calls[f"{Path(caller.filename).relative_to(ROOT / 'pretrain')}:{caller.name}"] += 1
            return method(*args, **kwargs)

        return counted


def run(case: Case) -> dict[str, Any]:
    """Train the case. Return what each rank observed."""
    observer, methods = Observer(), {name: getattr(torch.Tensor, name) for name in WAITS}
    step_loop.train_batch = observer.train_batch
    sent = install_fake_services()
    start, world = start_of(case), running_environment()
    try:
        if case.get("count_waits"):
            for name, method in methods.items():
                setattr(torch.Tensor, name, observer.count(method, name))
        time_outs = TimeOuts.from_flags(start.plan.args)
        with rank_guards(Path(start.plan.args.save), world, time_outs, LauncherWatch(world)) as guards:
            code = trainer.train(start.plan, world, [], guards, start.weights)
    finally:
        for name, method in methods.items():
            setattr(torch.Tensor, name, method)
    return {"code": code, "norms": observer.norms, "param_norms": observer.param_norms,
            "update_ratios": observer.update_ratios, "waits": gather(observer.waits), "sent": sent,
            "losses": gather(observer.losses)}


def plain_monitors(case: Case) -> dict[str, Any]:
    """Train two steps and evaluate two batches with DeepSpeed's own use of its monitors. Return what they got."""
    sent = install_fake_services()
    plan = start_of(case).plan
    engine = engine_of(plan)
    loader = open_loader(engine, plan, "train")
    for step in range(2):
        train_batch(engine, loader.step(step * plan.layout.global_batch_size))
    for step in range(2):
        eval_batch(engine, loader.step(step * plan.layout.global_batch_size))
    loader.close()
    end(engine)
    return {"sent": sent}


if __name__ == "__main__":
    trainer.init_process_group = lambda *_: None
    trainer.leave_process_group = lambda: None
    each_case(lambda case: globals()[case["job"]](case))
    sys.exit(0)
