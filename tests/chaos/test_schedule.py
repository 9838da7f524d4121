"""The schedule of faults: how many of each kind, and when."""

from itertools import pairwise

import pytest

from pretrain.chaos.kinds import KINDS
from pretrain.chaos.schedule import Schedule, make_schedule


def kinds_of(schedule: Schedule) -> dict[str, int]:
    return {kind: count for kind in KINDS if (count := schedule.count(kind))}


@pytest.mark.parametrize("seed", range(20))
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
