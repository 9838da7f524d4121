"""The step loop whose guards can be switched off, as a baseline.

The main function of its processes never returns.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain import step_loop, trainer
from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.request_loop import RequestLoop
from pretrain.data.loader import MicroBatch
from pretrain.distributed.world import running_environment
from pretrain.engine.build import DeepSpeedEngine
from pretrain.engine.steps import train_batch
from pretrain.memory.memory_watch import MemoryWatch
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.rank_guards import rank_guards
from pretrain.resilience.replica_check import compare_copies
from pretrain.resilience.requests import Request
from pretrain.resilience.watchdog import TimeOuts


class _Switch:
    """Switches all guards of this process on or off."""

    def __init__(self) -> None:
        self.on = True
        self.set_update_guard: Callable[[bool], None] = lambda on: None
        self.guards: dict[str, Any] = {}  # those that `train` has created, by the names of their classes

    def set(self, on: bool) -> None:
        if on != self.on:
            self.on = on
            self.set_update_guard(on)


class _Switchable:
    """A guard of the step loop. While the switch is off, its methods in `idle` return these values instead."""

    def __init__(self, guard: Any, switch: _Switch, idle: dict[str, Any]) -> None:
        self.guard, self._switch, self._idle = guard, switch, idle

    def __getattr__(self, name: str) -> Any:
        if self._switch.on or name not in self._idle:
            return getattr(self.guard, name)
        return lambda *args, **settings: self._idle[name]


def guarded_loop(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Run `train` of pretrain/trainer.py. The key "guards" of a request switches its guards on or off.

    Instead of steps, a request with the key "replica_check" times one comparison of the parameters' copies, and one
    with the key "exchanges" this number of exchanges of the requests to save or stop.
    """
    world, plan, switch = running_environment(), job.plan(), _Switch()
    losses: list[torch.Tensor] = []
    _make_switchable(switch)

    def train_batch_on_request(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
        if losses:
            requests.after_step(losses.pop())
        else:
            requests.report_build(parameters=sum(weight.numel() for weight in engine.module.parameters()))
        while "replica_check" in requests.request or "exchanges" in requests.request:
            for _ in range(requests.request.get("exchanges", 0)):
                switch.guards["Requests"].poll(0)
            if "replica_check" in requests.request:
                compare_copies(engine)
            requests.end_repetition()
        switch.set(requests.request.get("guards", True))
        losses.append(train_batch(engine, micro_batches))
        return losses[0]

    step_loop.train_batch = train_batch_on_request
    watch = MemoryWatch.start(plan, world)
    with rank_guards(Path(plan.args.save), world, TimeOuts.from_flags(plan.args), LauncherWatch(world)) as guards:
        watchdog: Any = _Switchable(guards.watchdog, switch, {"enter": None})
        trainer.train(plan, world, step_loop.StepCallbacks(watch.before_step, watch.after_step),
                      replace(guards, watchdog=watchdog))
    requests.end()


def _make_switchable(switch: _Switch) -> None:
    """Let `train` create guards that obey the switch."""
    def make(name: str, idle: dict[str, Any]) -> None:
        create = getattr(trainer, name)

        def create_switchable(*args: Any, **settings: Any) -> _Switchable:
            switch.guards[name] = create(*args, **settings)
            return _Switchable(switch.guards[name], switch, idle)

        setattr(trainer, name, create_switchable)

    make("Requests", {"poll": Request()})
    make("Guard", {"observe": None})
    make("ReplicaCheck", {"check": None})
    guard_updates = trainer.guard_updates

    def guard_updates_if_on(engine: DeepSpeedEngine, *args: Any, **settings: Any) -> Any:
        before = _hooks(engine)
        guarded = guard_updates(engine, *args, **settings)
        after = _hooks(engine)
        switch.set_update_guard = lambda on: _restore(engine, after if on else before)
        return guarded

    trainer.guard_updates = guard_updates_if_on


def _hooks(engine: DeepSpeedEngine) -> tuple[Any, Any, dict[int, Any]]:
    """Return what `guard_updates` replaces: the update, the pipeline's loss function, the hooks of the module."""
    return engine.optimizer.step, getattr(engine.module, "loss_fn", None), dict(engine.module._forward_hooks)


def _restore(engine: DeepSpeedEngine, hooks: tuple[Any, Any, dict[int, Any]]) -> None:
    engine.optimizer.step, loss_fn, forward_hooks = hooks
    if loss_fn is not None:
        engine.module.loss_fn = loss_fn
    engine.module._forward_hooks.clear()
    engine.module._forward_hooks.update(forward_hooks)
