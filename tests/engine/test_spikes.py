"""Spikes: what counts as one, which values enter the window, and that healthy runs have none."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pretrain.engine.spikes import Spike, SpikeWindow, SpikeWindows

GOLDEN = Path(__file__).parents[1] / "golden"
LENGTH, THRESHOLD = 32, 6.0
Curve = tuple[list[float], list[float]]  # loss and gradient norm of each step


def window(values: Iterable[float] | None = None, name: str = "loss", length: int = LENGTH) -> SpikeWindow:
    """Return a window with 64 noisy values around 3, or with `values`."""
    new = SpikeWindow(name, length=length, threshold=THRESHOLD)
    values = 3 + 0.05 * np.random.default_rng(0).standard_normal(64) if values is None else values
    assert not [spike for step, value in enumerate(values) if (spike := new.add(step, float(value)))]
    return new


def healthy_curves() -> Iterator[tuple[str, Curve]]:
    """Yield recorded curves of small models, and generated ones: noise of many sizes on a fall from the first step."""
    quickstart = np.loadtxt(GOLDEN / "quickstart_curve.txt")  # launch/quickstart.yaml
    yield "quickstart", (quickstart[:, 1].tolist(), quickstart[:, 2].tolist())
    small = np.loadtxt(GOLDEN / "healthy_curves.txt")
    yield "small model, high rate", (small[:, 0].tolist(), small[:, 1].tolist())
    yield "small model, small batch", (small[:, 2].tolist(), small[:, 3].tolist())
    for seed, (noise, spread, fall) in enumerate((noise, spread, fall) for noise in (0.002, 0.02, 0.08)
                                                 for spread in (0.03, 0.2, 0.35) for fall in (20, 150, 2000)):
        numbers, steps = np.random.default_rng(seed), np.arange(1500)
        losses = 2.5 + 8 * np.exp(-steps / fall) + noise * numbers.standard_normal(1500)
        norms = (0.3 + 5 * np.exp(-steps / fall)) * np.exp(spread * numbers.standard_normal(1500))
        yield f"noise {noise}, spread of norms {spread}, fall in {fall} steps", (losses.tolist(), norms.tolist())


def test_a_spike_is_found_and_reported_in_deviations() -> None:
    found = window().find(3.5)
    assert found is not None
    assert (found.name, found.value) == ("loss", 3.5)
    assert 7 < found.z < 15
    assert f"{found.z:.3f}" == f"{(found.value - found.mean) / found.std:.3f}"
    assert window().find(3.2) is None
    norm = window([0.5, 0.6, 0.7] * 20, "grad_norm").find(9.0)
    assert norm is not None
    assert (norm.value, norm.mean) == (9.0, 0.6)
    assert norm.z == pytest.approx(math.log(15) / math.log1p(norm.std / 0.6))


def test_only_upward_deviations_count() -> None:
    assert window().find(-100.0) is None
    assert window(np.geomspace(11, 3, 300)).find(2.0) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_do_not_enter(value: float) -> None:
    poisoned, clean = window(), window()
    for step in range(100, 200):
        assert poisoned.add(step, value) is None
    assert poisoned.find(3.5) == clean.find(3.5)
    assert poisoned.find(3.5) is not None


def test_norms_of_0_do_not_enter() -> None:
    """They have no logarithm: batches whose tokens are all masked."""
    norms = window([0.0] * 50 + [1.0] * 12, "grad_norm")
    assert norms.find(100.0) is None, "not half of the window"
    assert norms.find(0.0) is None


def test_a_spike_does_not_hide_the_next_one() -> None:
    spiky = window()
    assert spiky.add(100, 1e30) is not None
    assert spiky.add(101, 3.0) is None
    assert spiky.add(102, 4.0) is not None


@pytest.mark.parametrize("length", [LENGTH, 128])
def test_a_lasting_change_of_the_level_is_accepted(length: int) -> None:
    shifted = window(length=length)
    found = [shifted.add(100 + number, 10.0) is not None for number in range(3 * length)]
    accepted_after = found.index(False)
    print(f"\na new level is accepted after {accepted_after} steps of a window of {length}")
    assert 4 <= accepted_after < length // 4
    assert not any(found[accepted_after:])


def test_there_is_no_decision_before_half_of_the_window_is_filled() -> None:
    young = SpikeWindow("loss", length=LENGTH, threshold=THRESHOLD)
    for step in range(LENGTH // 2):
        assert young.find(1e9) is None
        young.add(step, 3.0)
    assert young.find(1e9) is not None


def test_rounding_errors_of_a_constant_and_tiny_losses_are_no_spikes() -> None:
    assert window([0.1 + 0.2, 0.3] * 40).find(0.3 + 1e-5) is None
    assert window([0.0] * 40).find(0.0) is None
    assert window([3.0] * 40).find(3.1) is not None
    assert window([0.01, 0.02, 0.06, 0.1] * 20).find(0.25) is None, "of data that is known by heart"


def test_steps_after_a_rollback_are_forgotten() -> None:
    returned = window([3.0] * 40 + [3.01] * 10)
    returned.forget_after(39)
    found, expected = returned.find(9.0), window([3.0] * 40).find(9.0)
    assert found is not None
    assert found == expected
    returned.forget_after(-1)
    assert returned.find(9.0) is None


def spikes(curve: Curve, *, length: int = 128) -> list[list[Spike]]:
    """Return the spikes of the losses, and those of the norms."""
    windows = SpikeWindows(length=length, threshold=THRESHOLD).by_name.values()
    return [[spike for step, value in enumerate(values) if (spike := each.add(step, value))]
            for each, values in zip(windows, curve, strict=True)]


def test_healthy_curves_have_no_spikes(subtests: pytest.Subtests) -> None:
    for name, curve in healthy_curves():
        with subtests.test(name):
            assert spikes(curve) == [[], []]


def test_planted_spikes_are_found_in_healthy_curves(subtests: pytest.Subtests) -> None:
    """Twice the usual loss, and 12 times the usual norm, from the first step on that can be one.

    What is usual is the median of a few steps before, so that it is that of the falling curve.
    """
    for name, curve in healthy_curves():
        with subtests.test(name):
            for values, kind, factor in zip(curve, ("loss", "grad_norm"), (2.05, 12.0), strict=True):
                each, missed = SpikeWindow(kind, length=128, threshold=THRESHOLD), []
                for step, value in enumerate(values):
                    usual = float(np.median(values[max(step - 20, 0):step + 1]))
                    if step >= 64 and step % 3 == 0 and each.find(factor * usual) is None:
                        missed.append(step)
                    each.add(step, value)
                assert not missed, kind


def test_a_resumed_run_decides_as_if_it_had_not_ended() -> None:
    """With the values of a checkpoint, whatever the step of the save; also with a window of another length."""
    (_, curve), *_ = list(healthy_curves())[1:]
    saved = SpikeWindows(length=128, threshold=THRESHOLD)
    for step, values in enumerate(zip(*curve, strict=True)):
        for each, value in zip(saved.by_name.values(), values, strict=True):
            each.add(step, value)
        if step not in (3, 70, 150, 400):
            continue
        resumed, longer = (SpikeWindows(length=length, threshold=THRESHOLD) for length in (128, 256))
        for new in (resumed, longer):
            new.set_state(saved.state())
        for name, each in saved.by_name.items():
            for factor in (1.5, 3.0, 20.0):
                assert resumed.by_name[name].find(factor * curve[0][step]) == each.find(factor * curve[0][step])
            assert (longer.by_name[name].find(1e6) is not None) == (step >= 127)
    resumed.set_state(None)
    assert resumed.state() is None
