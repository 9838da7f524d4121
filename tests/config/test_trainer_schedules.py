"""Each schedule of transformers with any settings: all rates are equal here, or the reason is named."""

import itertools
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_utils import SchedulerType

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.make_schedule import make_schedule
from pretrain.config.plan import run_length
from pretrain.config.trainer_schedules import schedule_flags
from pretrain.data.token_schedules import fixed_batch

PEAK, TOTAL = 2e-3, 40
# values of each key of lr_scheduler_kwargs; all combinations are tried
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cosine": {"num_cycles": (None, 0.5, 1.5)}, "cosine_with_restarts": {"num_cycles": (None, 1, 2)},
    "cosine_with_min_lr": {"min_lr": (None, 4e-4), "min_lr_rate": (None, 0.25), "num_cycles": (None, 0.75)},
    "cosine_warmup_with_min_lr": {"min_lr": (None, 4e-4), "min_lr_rate": (None, 0.25), "warmup_lr_rate": (None, 0.3)},
    "polynomial": {"lr_end": (None, 1e-4), "power": (None, 1.0, 2.0)}, "inverse_sqrt": {"timescale": (None, 5, 9)},
    "warmup_stable_decay": {"num_decay_steps": (10,), "num_stable_steps": (None, 12), "min_lr_ratio": (None, 0.2),
                            "warmup_type": (None, "cosine"), "decay_type": (None, "linear", "cosine", "1-sqrt"),
                            "num_cycles": (None, 1.5)}}
CASES = [(kind.value, dict(zip(keys, values, strict=True)), warmup)
         for kind in SchedulerType for keys in [tuple(SETTINGS.get(kind.value, {}))]
         for values in itertools.product(*SETTINGS.get(kind.value, {}).values()) for warmup in (0, 5)]


def rates_of_transformers(kind: str, settings: dict[str, Any], warmup: int) -> list[float] | None:
    """Return the rates of all steps; None: transformers rejects the settings, or the losses decide the rates."""
    if kind in ("reduce_lr_on_plateau", "greedy"):
        return None
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    try:
        scheduler = transformers.get_scheduler(kind, optimizer, warmup, TOTAL, scheduler_specific_kwargs=settings)
    except ValueError:
        return None
    found = []
    for _ in range(TOTAL):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def rates_here(flags: dict[str, Any]) -> list[float]:
    length = run_length(TOTAL, None, batch_sizes=fixed_batch(4), seq_length=8)
    schedule = make_schedule(RunArguments(**flags), peak=PEAK, length=length)
    return [schedule(step) for step in range(TOTAL)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rates_are_those_of_transformers_or_the_reason_is_named() -> None:
    equal, different = set(), set()
    for kind, values, warmup in CASES:
        settings = {key: value for key, value in values.items() if value is not None}
        flags, reason = schedule_flags(kind, settings, warmup=warmup, total=TOTAL)
        expected = rates_of_transformers(kind, settings, warmup)
        assert bool(flags) != bool(reason)
        if reason:
            different.add(kind)
            assert any(word in reason for word in (kind, "inverse_sqrt", "warmup_stable_decay"))
        elif expected is not None:
            equal.add(kind)
            assert rates_here(flags) == pytest.approx(expected, rel=1e-9, abs=1e-15), (kind, settings, warmup)
    assert equal == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}
    assert different == {"reduce_lr_on_plateau", "greedy", "inverse_sqrt", *(
        kind for kind in SETTINGS if kind != "inverse_sqrt")}


def test_a_warm_up_that_is_over_may_have_any_form() -> None:
    """After it, the rates are equal."""
    for kind, settings in (("warmup_stable_decay", {"num_decay_steps": 10, "min_lr_ratio": 0.2}),
                           ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.25, "warmup_lr_rate": 0.3})):
        assert schedule_flags(kind, settings, warmup=5, total=TOTAL, passed=4)[0] == {}
        flags, _ = schedule_flags(kind, settings, warmup=5, total=TOTAL, passed=5)
        expected = rates_of_transformers(kind, settings, 5)
        assert expected is not None
        assert rates_here(flags)[5:] == pytest.approx(expected[5:], rel=1e-9)
    assert schedule_flags("linear", {}, warmup=41, total=TOTAL)[0] == {}
