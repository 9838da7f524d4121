"""The step loop with an engine that only counts: where a callback's stop takes effect, and what a rollback undoes."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from pretrain import step_loop
from pretrain.callback import Callback, Callbacks, Run
from pretrain.resilience.requests import Request
from pretrain.step_loop import StepLoop
from tests.support.callback_runs import run_of


class StopAt(Callback):
    """Stops the run at a point of step 2, the first time."""

    def __init__(self, point: str, **how: Any) -> None:
        self.point, self.how, self.calls = point, how, 0

    def _act(self, point: str, run: Run) -> None:
        if point == self.point and run.step == 2 and self.calls == 0:
            self.calls += 1
            run.stop("--mine", **self.how)

    def after_step(self, run: Run, result: Any) -> None:
        self._act("after_step", run)

    def accepted(self, run: Run) -> None:
        self._act("accepted", run)

    def end_step(self, run: Run) -> None:
        self._act("end_step", run)


def loop_of(callback: Callback, monkeypatch: pytest.MonkeyPatch, *, bad_step: int = 0) -> StepLoop:
    """Return a loop over 4 steps that saves every 10 steps. The guard rolls `bad_step` back to step 1, once."""
    for name, value in (("train_batch", lambda *_: 0.0), ("learning_rate_of_update", lambda _: 0.1),
                        ("announce_end", MagicMock()), ("roll_back", lambda *_: (1, 1))):
        monkeypatch.setattr(step_loop, name, value)
    args = SimpleNamespace(save_interval=10, eval_interval=0, save="run")
    plan = SimpleNamespace(last_step=4, train_steps=8, args=args,
                           length=SimpleNamespace(batch_sizes=SimpleNamespace(at=lambda position: 1)))
    run = run_of(plan)
    run.loaders["train"] = MagicMock()
    bad = [bad_step]

    def observe(step: int, *_: Any) -> Any:
        if step == bad[0]:
            bad[0] = 0
            return SimpleNamespace(last_step=step)
        return None

    guard = MagicMock(observe=observe)
    requests = MagicMock(poll=lambda step: Request())
    return StepLoop(run, Callbacks([callback]), guard, MagicMock(), requests, MagicMock())


@pytest.mark.parametrize("point", ["after_step", "accepted", "end_step"])
@pytest.mark.parametrize("save", [True, False])
def test_a_stop_saves_or_does_not_wherever_it_is_called(point: str, save: bool,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(StopAt(point, save=save), monkeypatch)
    assert loop.train() == "--mine"
    assert (loop.run.step, loop.saver.save.call_count) == (2, int(save))  # type: ignore[attr-defined]


def test_a_rollback_undoes_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(StopAt("after_step", is_done=True), monkeypatch, bad_step=2)
    assert loop.train() == ""
    assert (loop.run.step, loop.run.is_done) == (4, False)


class Requested(Callback):
    def __init__(self) -> None:
        self.calls: list[Request] = []

    def requested(self, run: Run, request: Request) -> None:
        self.calls.append(request)


def test_a_step_without_a_request_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Requested()
    loop_of(callback, monkeypatch).train()
    assert callback.calls == []
