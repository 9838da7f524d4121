"""The learning-rate range test: rates, smoothing, divergence and the suggested rate, from losses of known shape."""

import itertools
import json
import math
from pathlib import Path

import pytest

from pretrain.extensions.sanity.lr_range import (
    DIVERGED,
    SMOOTHING,
    Point,
    RangeTest,
    Smoother,
    evaluate_range,
    has_diverged,
    plot_range,
    range_lines,
    rate_at,
    write_range_json,
)

STEPS, LOW, HIGH = 121, 1e-6, 1.0


def points_of(losses: list[float]) -> list[Point]:
    smoother, points = Smoother(), list[Point]()
    for step, loss in enumerate(losses):
        points.append(Point(rate_at(step, low=LOW, high=HIGH, steps=STEPS), loss, smoother.add(loss)))
        if has_diverged(points):
            break
    return points


def sigmoid_fall(middle: float, blow_up: float = math.inf) -> list[float]:
    """Losses that fall from 8 to 4, fastest at the rate `middle`, and grow tenfold above the rate `blow_up`."""
    rates = [rate_at(step, low=LOW, high=HIGH, steps=STEPS) for step in range(STEPS)]
    return [4 + 4 / (1 + (rate / middle) ** 2) + (40 if rate > blow_up else 0) for rate in rates]


def test_rates_grow_exponentially_and_the_average_is_corrected_for_its_start() -> None:
    rates = [rate_at(step, low=LOW, high=HIGH, steps=STEPS) for step in range(STEPS)]
    assert (rates[0], rates[-1]) == (LOW, pytest.approx(HIGH))
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([10 ** (6 / 120)] * 120)
    smoother = Smoother()
    assert [smoother.add(loss) for loss in (1.0, 2.0)] == pytest.approx([1.0, (SMOOTHING * 1 + 2) / (SMOOTHING + 1)])


def test_the_suggestion_is_the_steepest_descent_or_a_tenth_of_the_divergence() -> None:
    test = evaluate_range(points_of(sigmoid_fall(1e-4, blow_up=0.3)))
    assert test.steepest is not None
    assert 0.5e-4 < test.steepest < 4e-4  # the average lags behind by a few steps
    assert test.diverged_at is not None
    assert 0.3 < test.diverged_at < 0.5
    assert test.suggested == test.steepest
    test = evaluate_range(points_of(sigmoid_fall(1e-3, blow_up=2e-3)))
    assert test.diverged_at is not None
    assert test.suggested == pytest.approx(test.diverged_at / 10)
    assert len(test.points) < STEPS


def test_divergence() -> None:
    """A loss that is not finite, an average above the lowest one, and a rise at the end; but not a single high loss."""
    losses = sigmoid_fall(1e-4)
    losses[90] = math.nan
    test = evaluate_range(points_of(losses))
    assert test.diverged_at == pytest.approx(rate_at(90, low=LOW, high=HIGH, steps=STEPS))
    assert test.suggested is not None
    for factor, diverged in ((DIVERGED - 0.01, False), (DIVERGED + 0.01, True)):
        assert has_diverged([Point(1e-3, 5.0, 5.0), Point(1e-2, 5.0 * factor, 5.0 * factor)]) == diverged
    for steps_after in (1, 2, 5):  # the average is still low
        test = evaluate_range(points_of([*(loss + 2 for loss in sigmoid_fall(1e-4)[:100]), *[8.9] * steps_after]))
        assert test.diverged_at == rate_at(100, low=LOW, high=HIGH, steps=STEPS)  # the rate of the first high loss
        assert len(test.points) <= 102
    losses = [6.0] * 40
    losses[20] = 8.9
    test = evaluate_range(points_of(losses))
    assert (len(test.points), test.diverged_at) == (40, None)


def test_no_rate_is_suggested_if_the_loss_never_falls() -> None:
    rising = evaluate_range(points_of([8 + 0.001 * step for step in range(20)]))
    assert (rising.steepest, rising.diverged_at, rising.suggested) == (None, None, None)
    assert "the loss did not fall; use a higher --to" in "\n".join(range_lines(rising))
    assert evaluate_range(points_of([math.nan])).suggested is None
    # a run that diverges without falling gets no advice to raise the rate
    losses = [*[6.05] * 20, *[6.0] * 60, *[6.0 + i for i in range(20)]]
    lines = "\n".join(range_lines(evaluate_range(points_of(losses))))
    assert "use a higher --to" not in lines
    assert "random tokens cannot be learned" in lines


def test_files_hold_the_test(tmp_path: Path) -> None:
    test: RangeTest = evaluate_range(points_of([*sigmoid_fall(1e-4)[:90], math.nan]))
    write_range_json(tmp_path / "lr.json", test)
    found = json.loads((tmp_path / "lr.json").read_text())
    assert found["suggested"] == test.suggested
    assert [point["loss"] for point in found["points"]] == [*[point.loss for point in test.points[:-1]], None]
    for name in ("one.svg", "two.svg"):
        plot_range(tmp_path / name, test)
    drawing = (tmp_path / "one.svg").read_text()
    assert drawing == (tmp_path / "two.svg").read_text()
    assert f"suggested: {test.suggested:.1e}" in drawing
    assert "http" not in drawing.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", "").replace("https://matplotlib.org", "")
