"""Signals, STOP, SAVE and --exit_after_minutes in real runs of two ranks: no step is lost. One launch runs all cases.

tests/cluster/test_launcher_signals.py sends signals to real launchers.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints
from pretrain.checkpoint.format.verify import find_damage
from tests.support.cases import DROPOUT, flags
from tests.support.launch import run_worker
from tests.support.layouts import dp2, pp2
from tests.support.run_rows import events, log
from tests.test_train import losses

STEPS = 24
LAYOUTS = {"zero1": dp2(1, precision="bf16"), "zero3": dp2(3), "pipeline": pp2(1, precision="bf16")}
ASYNC = {"async_save": "true"}
Start = tuple[str, dict[str, Any], dict[str, Any]]  # action, further keys of the case, further flags
FILES = {"files": ["SAVE"]}
# Starts of one run, in order. The request arrives in step "hold_at" of the start, which is far slower than the others.
CHAINS: dict[str, list[Start]] = {
    "zero3": [("SIGTERM", {"ranks": [1], "hold_at": 1}, {}), ("SIGHUP", {"ranks": [0, 1], "hold_at": 7}, ASYNC),
              ("touch", {**FILES, "hold_at": 3}, {})],
    "pipeline": [("SIGUSR1", {"ranks": "launcher", "hold_at": 3}, ASYNC),
                 ("SIGKILL", {"ranks": "launcher", "hold_at": 9}, {}), ("touch", {**FILES, "hold_at": 2}, {})]}
SLOW_CHAIN: list[Start] = [(name, {"ranks": ranks}, more) for name, more in (
    ("SIGTERM", {}), ("SIGUSR1", ASYNC), ("SIGINT", {}), ("SIGHUP", {})) for ranks in ([0], [1], [0, 1], "launcher")]


class CaseList:
    """Collects the cases of one launch of signalled.py."""

    def __init__(self, corpus: str, folder: Path, steps: int = STEPS) -> None:
        self.cases: list[dict[str, Any]] = []
        self._corpus, self._folder, self._steps = corpus, folder, steps

    def add(self, run: str, layout: str, action: str, keys: dict[str, Any], more: dict[str, Any]) -> None:
        """Add a start of the run folder `run`. Its name is RUN and the number of the start."""
        path = self._folder / f"{layout}.json"
        path.write_text(json.dumps(LAYOUTS[layout]))
        values = {"log_interval": 1, "save_interval": 0, **flags(
            self._corpus, steps=self._steps, deepspeed_config=path, save=self._folder / run, layers=2,
            overrides=DROPOUT), **more}
        number = sum(case["run"] == str(self._folder / run) for case in self.cases)
        self.cases.append({"name": f"{run} {number}", "act": action, "run": str(self._folder / run), **keys,
                           "flags": [f"--{key}={value}" for key, value in values.items()]})

    def chain(self, layout: str, starts: Sequence[Start]) -> None:
        """Add an uninterrupted run, and the starts of an interrupted one."""
        self.add(f"{layout} uninterrupted", layout, "run", {}, {})
        for start in starts:
            self.add(layout, layout, *start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def results(corpus: str, folder: Path) -> dict[str, Any]:
    """Return the exit codes of all starts by case name."""
    cases = CaseList(corpus, folder)
    for layout, starts in CHAINS.items():
        cases.chain(layout, starts)
    for mode, more in (("sync", {}), ("async", ASYNC)):
        first = {"ranks": [0], "during_save": "second"}
        cases.add(f"second {mode}", "zero1", "SIGTERM", first, more)
    cases.add("third", "zero1", "nothing", {}, {"exit_step": 5})
    cases.add("third", "zero1", "SIGUSR1", {"ranks": [0], "during_save": "third"}, {})
    cases.add("third", "zero1", "touch", {"files": ["STOP"]}, {})
    cases.add("third", "zero1", "run", {}, {})
    cases.add("time", "zero1", "run", {}, {"exit_after_minutes": 0.001})
    return run_worker("signalled.py", cases.cases, 1, folder, timeout=3000)


@pytest.mark.parametrize("layout", CHAINS)
def test_signals_lose_no_step(results: dict[str, Any], folder: Path, layout: str) -> None:
    """Each step is trained once, and all losses equal the uninterrupted run's bit for bit."""
    run, chain = folder / layout, CHAINS[layout]
    codes = [set(results[f"{layout} {number}"]["status"]) for number in range(len(chain))]
    assert codes == [{75}, {75}, {0}], log(run)
    assert results[f"{layout} uninterrupted 0"]["status"] == [0, 0]
    assert losses(run) == losses(folder / f"{layout} uninterrupted")
    stops = events(run, "stop")
    reasons = [name if name != "SIGKILL" else "the end of the launcher" for name, *_ in chain[:2]]
    assert [row["reason"] for row in stops] == [*reasons, "finished"]
    held = list(itertools.accumulate(keys["hold_at"] for _, keys, _ in chain))
    assert [row["step"] for row in events(run, "signal")] == held, "each request takes effect in the step it arrives in"
    assert [row["step"] for row in stops[:2]] == held[:2]
    assert [row["step"] for row in events(run, "resume")] == [row["step"] for row in stops[:2]]
    assert [row["reason"] for row in events(run, "signal")] == [*reasons, str(run / "SAVE")]


@pytest.mark.parametrize("layout", CHAINS)
def test_the_file_save_is_obeyed_and_removed(results: dict[str, Any], folder: Path, layout: str) -> None:
    run = folder / layout
    *_, requested, last = events(run, "save")
    assert requested["step"] == events(run, "signal")[-1]["step"] < STEPS == last["step"]
    assert not (run / "SAVE").exists()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_second_signal_during_the_save_changes_nothing(results: dict[str, Any], folder: Path, mode: str) -> None:
    run = folder / f"second {mode}"
    assert results[f"second {mode} 0"]["status"] == [75, 75], log(run)
    (found,) = complete_checkpoints(run / "checkpoints")[0]
    assert find_damage(*found) == []
    assert found[1].step == losses(run)[-1][0]
    if mode == "sync":  # with --async_save, a process in a session of its own writes
        assert "SIGINT: the run is about to save and stop; the next signal ends it at once" in log(run)


def test_the_third_signal_ends_at_once_and_complete_checkpoints_remain(results: dict[str, Any], folder: Path) -> None:
    run = folder / "third"
    assert results["third 0"]["status"] == [0, 0]
    codes = results["third 1"]["status"]
    assert codes[0] == 130, log(run)
    assert codes[1] not in (0, 75)  # its peer has ended
    assert "SIGINT: ended at once" in log(run)
    assert events(run, "resume")[-1]["step"] == 5, "the checkpoint before the third signal"


def test_a_stop_file_stops_the_run_and_prevents_the_next_start(results: dict[str, Any], folder: Path) -> None:
    run = folder / "third"
    assert results["third 2"]["status"] == [75, 75], log(run)
    assert events(run, "stop")[-1]["reason"] == str(run / "STOP")
    assert f"after `rm {run / 'STOP'}`, the same command continues" in log(run)
    assert results["third 3"]["status"] == [2, 2]
    assert f"{run / 'STOP'}: this file stops the run. rm {run / 'STOP'}." in log(run)


def test_the_time_limit_saves_and_stops(results: dict[str, Any], folder: Path) -> None:
    run = folder / "time"
    assert results["time 0"]["status"] == [75, 75], log(run)
    (stop,) = events(run, "stop")
    assert stop["reason"] == "--exit_after_minutes"
    assert stop["step"] == losses(run)[-1][0] == events(run, "save")[-1]["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_signal_to_every_rank_loses_no_step(corpus: str, layout: str, tmp_path: Path) -> None:
    cases = CaseList(corpus, tmp_path, steps=8 * len(SLOW_CHAIN))
    cases.chain(layout, [*SLOW_CHAIN, ("run", {}, {})])
    done = run_worker("signalled.py", cases.cases, 1, tmp_path, timeout=3000)
    codes = [set(done[f"{layout} {number}"]["status"]) for number in range(len(SLOW_CHAIN) + 1)]
    assert codes == [{75}] * len(SLOW_CHAIN) + [{0}], log(tmp_path / layout)
    assert losses(tmp_path / layout) == losses(tmp_path / f"{layout} uninterrupted")
