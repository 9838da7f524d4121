"""The faults of a run: how many of each kind, and when; commands that are rejected."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pretrain.errors import ConfigError
from tests.chaos.faults import KINDS, Schedule, make_schedule
from tests.chaos.run import ChaosSettings, make_settings

LAUNCHER = ["ds-pretrain", "--num_accelerators", "2", "--"]


def kinds_of(schedule: Schedule) -> dict[str, int]:
    return dict(Counter([*(fault.kind for fault in schedule.faults), *("nan" for _ in schedule.bad_steps)]))


@pytest.mark.parametrize("seed", range(5))
def test_all_faults_are_planned_within_the_run(seed: int) -> None:
    schedule = make_schedule(tuple(KINDS), faults=200, seed=seed, train_steps=500)
    counts = kinds_of(schedule)
    assert sum(counts.values()) == 200
    assert counts.keys() == KINDS.keys()  # every kind
    for effect in ("ends", "continues", "damages"):
        same = [count for kind, count in counts.items() if KINDS[kind].effect == effect]
        assert max(same) - min(same) <= 1
    assert all(1 <= fault.step <= 400 for fault in schedule.faults)
    steps = sorted(bad.step for bad in schedule.bad_steps)
    assert all(second - first >= 2 for first, second in pairwise(steps))
    assert max(steps) < 499


def test_damage_is_followed_by_the_end_of_a_start() -> None:
    schedule = make_schedule(tuple(KINDS), faults=100, seed=1, train_steps=300)
    effects = [KINDS[fault.kind].effect for fault in schedule.faults]
    last_end = max(index for index, effect in enumerate(effects) if effect == "ends")
    late = [fault for fault in schedule.faults[last_end + 1:] if KINDS[fault.kind].effect == "damages"]
    assert not late or schedule.faults[last_end].moment == "starting"
    assert schedule.faults[0].moment != "starting"  # the first start must log a step


def test_the_seed_determines_the_schedule() -> None:
    first, again, other = (make_schedule(tuple(KINDS), faults=50, seed=seed, train_steps=200) for seed in (3, 3, 4))
    assert first == again != other


def test_kinds_that_need_no_restart_can_be_chosen_alone() -> None:
    schedule = make_schedule(("pause", "nan"), faults=20, seed=0, train_steps=100)
    assert kinds_of(schedule) == {"pause": 10, "nan": 10}
    assert all(fault.moment == "running" for fault in schedule.faults)


def settings(run: Path, *words: str, launcher: list[str] = LAUNCHER, kinds: str | None = None) -> ChaosSettings:
    train = ["--model", "tiny", "--train_data", "data/corpus", "--train_steps", "50", "--save", str(run), *words]
    return make_settings([*launcher, *train], kinds=kinds, faults=10, seed=0, stall_s=1.0)


@pytest.mark.parametrize(("words", "kinds", "message"), [
    (["--train_steps", "9"], None, "--faults: 10 faults need at least 10 steps, and the command has --train_steps 9"),
    ([], "kill_rnak", 'Did you mean "kill_rank"?'),
    ([], "hang", "--step_timeout is 600 s"),
    (["--train_stepz", "9"], None, 'Did you mean "--train_steps"?'),
])
def test_wrong_flags_are_rejected(tmp_path: Path, words: list[str], kinds: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path / "run", *words, kinds=kinds)
    assert message in str(error.value)


def test_runs_on_other_hosts_and_folders_of_other_runs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on this host only"):
        settings(tmp_path / "run", launcher=["ds-pretrain", "--hostfile", "hosts", "--"])
    for name in ("run-reference", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("[]")
        with pytest.raises(ConfigError, match="this folder has a run already"):
            settings(tmp_path / "run")


def test_both_runs_get_the_same_command_with_their_own_folders(tmp_path: Path) -> None:
    """The first source of a blend is linked."""
    found = settings(tmp_path / "run", "--step_timeout", "20", "--train_data", "0.5", "data/web", "0.5", "data/code")
    assert found.reference_command[-4:] == ["--save", f"{tmp_path}/run-reference", "--log_interval", "1"]
    assert found.command == [*found.reference_command[:-4], "--save", f"{tmp_path}/run", "--log_interval", "1",
                             "--train_data", "0.5", f"{tmp_path}/run/chaos/data/web", "0.5", "data/code"]
    assert found.kinds == tuple(KINDS)
    assert "hang" not in settings(tmp_path / "run").kinds
