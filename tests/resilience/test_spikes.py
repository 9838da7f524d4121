"""The spike window: what counts as a spike, and which values enter the window."""

import math
from pathlib import Path

import numpy as np
import pytest

from pretrain.resilience.guard import SpikeWindow

GOLDEN = Path(__file__).parents[1] / "golden" / "quickstart_curve.txt"  # of a run of launch/quickstart.yaml, 300 steps
LENGTH, THRESHOLD = 32, 6.0


def window(values: list[float] | np.ndarray | None = None) -> SpikeWindow:
    """Return a window with 64 noisy values around 3, or with `values`."""
    new = SpikeWindow("loss", length=LENGTH, threshold=THRESHOLD)
    values = 3 + 0.05 * np.random.default_rng(0).standard_normal(64) if values is None else values
    assert [new.add(step, float(value)) for step, value in enumerate(values)] == [None] * len(values)
    return new


def test_a_spike_is_found_and_reported_in_standard_deviations() -> None:
    found = window().find(3.5)
    assert found is not None
    assert (found.name, found.value) == ("loss", 3.5)
    assert 8 < found.z < 12
    assert f"{found.z:.3f}" == f"{(found.value - found.mean) / found.std:.3f}"
    assert window().find(3.2) is None


def test_only_upward_deviations_count() -> None:
    assert window().find(-100.0) is None
    assert window(list(np.geomspace(11, 3, 300))).find(2.0) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_do_not_enter(value: float) -> None:
    poisoned, clean = window(), window()
    for step in range(100, 200):
        assert poisoned.add(step, value) is None
    assert poisoned.find(3.5) == clean.find(3.5)
    assert poisoned.find(3.5) is not None


def test_a_spike_does_not_hide_the_next_one() -> None:
    spiky = window()
    assert spiky.add(100, 1e30) is not None
    assert spiky.add(101, 3.0) is None
    assert spiky.add(102, 4.0) is not None


def test_a_lasting_change_of_the_level_is_accepted() -> None:
    shifted = window()
    found = [shifted.add(100 + number, 10.0) is not None for number in range(3 * LENGTH)]
    accepted_after = found.index(False)
    print(f"\na new level is accepted after {accepted_after} steps of a window of {LENGTH}")
    assert 1 <= accepted_after < LENGTH
    assert not any(found[accepted_after:])


def test_there_is_no_decision_before_half_of_the_window_is_filled() -> None:
    young = SpikeWindow("loss", length=LENGTH, threshold=THRESHOLD)
    for step in range(LENGTH // 2):
        assert young.find(1e9) is None
        young.add(step, 3.0)
    assert young.find(1e9) is not None


def test_rounding_errors_of_a_constant_are_no_spikes() -> None:
    assert window([0.1 + 0.2, 0.3] * 40).find(0.3 + 1e-5) is None
    assert window([0.0] * 40).find(0.0) is None
    assert window([3.0] * 40).find(3.1) is not None


def test_steps_after_a_rollback_are_forgotten() -> None:
    returned = window([3.0] * 40 + [3.01] * 10)
    returned.forget_after(39)
    found, expected = returned.find(9.0), window([3.0] * 40).find(9.0)
    assert found is not None
    assert expected is not None
    assert found.mean == expected.mean == 3.0
    returned.forget_after(-1)
    assert returned.find(9.0) is None


def count_spikes(values: list[float], *, length: int, threshold: float) -> int:
    """Return the number of spikes in a series of values, one per step."""
    window = SpikeWindow("loss", length=length, threshold=threshold)
    return sum(window.add(step, value) is not None for step, value in enumerate(values))


def test_noise_gives_no_false_alarms() -> None:
    numbers = np.random.default_rng(1)
    losses = 3 + 5 * np.exp(-np.arange(20_000) / 500) + 0.05 * numbers.standard_normal(20_000)
    assert count_spikes(losses.tolist(), length=128, threshold=6.0) == 0


def test_a_real_loss_curve_gives_no_false_alarms() -> None:
    rows = np.loadtxt(GOLDEN)
    for name, values in (("loss", rows[:, 1]), ("gradient norm", rows[:, 2])):
        numbers = {length: count_spikes(values.tolist(), length=length, threshold=6.0) for length in (16, 32, 64, 128)}
        print(f"\n{name}: false alarms in {len(values)} steps by length of the window: {numbers}")
        assert numbers[128] == 0, "the default"
        assert name != "loss" or not any(numbers.values())
        assert count_spikes([*values.tolist(), 2 * values.max()], length=128, threshold=6.0) == 1
