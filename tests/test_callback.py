"""The points of a run: who is called at each, in which order, with which values, and what an error says."""

import itertools
from typing import Any

import numpy as np
import pytest

from pretrain.callback import Callback, Callbacks, Run, StepResult
from pretrain.errors import ConfigError
from tests.support.callback_runs import run_of

POINTS = [name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_")]


class Recorded(Callback):
    """Writes its calls into a list; it has the points of its subclasses only."""

    def __init__(self, name: str, order: float, calls: list[str]) -> None:
        self.name, self.order, self.calls = name, order, calls  # type: ignore[misc]


class AtBoth(Recorded):
    def begin_step(self, run: Run) -> None:
        self.calls.append(f"{self.name} begins {run.step}")

    def close(self, run: Run) -> None:
        self.calls.append(f"{self.name} closes")


class AtEnd(Recorded):
    def close(self, run: Run) -> None:
        self.calls.append(f"{self.name} closes")


def test_the_order_does_not_depend_on_the_order_of_construction() -> None:
    """Lower `order` first, then the name; `close` in the reverse order. Only classes with the point are called."""
    for kinds in itertools.permutations([("b", 50), ("a", 50), ("c", 10)]):
        calls: list[str] = []
        call = Callbacks([*(AtBoth(name, order, calls) for name, order in kinds), AtEnd("d", 60, calls)])
        call("begin_step", run_of(None, step=7))
        call("close", run_of(None))
        assert calls == ["c begins 7", "a begins 7", "b begins 7", "d closes", "b closes", "a closes", "c closes"]


def test_a_point_that_nobody_has_costs_nothing() -> None:
    call = Callbacks([AtEnd("d", 60, [])])
    assert [point for point in POINTS if point != "connected" and call.at(point)] == ["close"]
    assert Callbacks([]).all == []


class Counting(Callback):
    """Gives two values a rank, and reads those of all ranks."""

    def __init__(self, first: float) -> None:
        self.first = first

    def rank_values(self, run: Run) -> list[float]:
        return [self.first, self.first + 1]

    def row_values(self, run: Run, ranks: np.ndarray) -> dict[str, Any]:
        return {f"seen_{self.first:g}": ranks.tolist()}


class OneKey(Callback):
    def row_values(self, run: Run, ranks: np.ndarray) -> dict[str, Any]:
        assert ranks.shape == (2, 0)
        return {"one": 1}


def test_each_callback_gets_the_values_that_it_gave_on_all_ranks() -> None:
    call, run = Callbacks([Counting(10), OneKey(), Counting(20)]), run_of(None)
    given = call.rank_values(run)
    own = [value for values in given.values() for value in values]
    ranks = np.array([own, [2 * value for value in own]])
    assert call.row_values(run, given, ranks) == {"seen_10": [[10, 11], [20, 22]], "seen_20": [[20, 21], [40, 42]],
                                                  "one": 1}


class Failing(Callback):
    def after_step(self, run: Run, result: StepResult) -> None:
        raise ValueError("no such thing")


def test_an_error_names_the_callback_the_point_and_the_step() -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        Callbacks([Failing()])("after_step", run_of(None, step=9), None)
    assert getattr(caught.value, "__notes__", ["in after_step of the callback Failing, step 9"]) == \
        ["in after_step of the callback Failing, step 9"]


class Stateful(Callback):
    name = "stateful"

    def __init__(self, state: Any) -> None:
        self.own = state

    def state(self) -> Any:
        return self.own


def test_states_have_names_of_their_own_and_a_form_that_json_knows() -> None:
    Callbacks([Stateful({"a": [1, 2.5, None]}), AtEnd("stateful", 1, [])]).check_states(run_of(None))
    with pytest.raises(ConfigError, match="callback stateful: two callbacks with a state have this name"):
        Callbacks([Stateful(1), Stateful(2)])
    with pytest.raises(ConfigError, match="callback stateful: JSON cannot represent its state: Object of type set"):
        Callbacks([Stateful({1, 2})]).check_states(run_of(None))


def test_a_phase_has_a_name_that_the_watchdog_knows() -> None:
    run = run_of(None, step=3)
    with run.phase("eval"):
        pass
    assert [call.args for call in run.watchdog.enter.call_args_list] == [("eval", 3), ("step", 3)]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="phase 'mine': expected one of eval, save"), run.phase("mine"):
        pass


def test_a_run_is_due_at_its_intervals_and_after_its_last_step() -> None:
    run = run_of(type("Plan", (), {"last_step": 7}))
    due = {interval: [step for step in range(1, 8) if setattr(run, "step", step) or run.is_due(interval)]
           for interval in (0, 1, 3)}
    assert due == {0: [7], 1: [1, 2, 3, 4, 5, 6, 7], 3: [3, 6, 7]}
