"""The expected losses of the target's run, from the laws of the smaller runs."""

from collections.abc import Mapping, Sequence

from pretrain.data.data_spec import names_of_split
from pretrain.errors import ConfigError
from pretrain.extensions.ladder.expected_curve import CurvePoint, Target, corpus_of
from pretrain.extensions.ladder.fit import fit_law, fit_stable_law
from pretrain.extensions.ladder.ladder_file import DECAYED, STABLE, Ladder, Point, Range
from pretrain.extensions.ladder.law import Law
from pretrain.extensions.ladder.target import TargetRun
from pretrain.monitor.curve import Expected

_CURVE_POINTS = 48  # at equal factors, and as many at equal distances


def make_ladder(target: TargetRun, points: Sequence[Point]) -> Ladder:
    """Fit the laws and predict the target. Raises ConfigError if the points do not determine the laws."""
    try:
        decayed = fit_law([point for point in points if point.decayed])
        laws = {DECAYED: decayed, STABLE: fit_stable_law(decayed, [point for point in points if not point.decayed])}
    except ValueError as error:
        raise ConfigError("ladder", problem=f"the law cannot be fitted: {error}",
                          remedy="give a larger --budget, or more --parameters") from None
    plan = target.plan
    sources = [source for name in ("train", *names_of_split(plan.datasets, "valid"))
               for source in plan.datasets[name].sources]
    fitted = Range.of(points)
    return Ladder(corpus_of(sources), plan.model.vocab_size, plan.model.architecture, target.scaling, list(points),
                  laws, fitted, predict_target(target, laws, fitted))


def predict_target(target: TargetRun, laws: Mapping[str, Law], fitted: Range) -> Target:
    """Return the expected losses of the target's run, under its own schedule."""
    length, last = target.plan.length, target.plan.train_steps
    first = max(target.schedule.warmup_steps, length.steps_of(int(fitted.tokens[0])), 1)
    first = min(first, max(1, last // 2))  # a curve has two points at least
    curve = []
    for step in _steps(first, last):
        tokens = float(length.tokens_after(step))
        expected = expected_loss(target, laws, step)
        curve.append(CurvePoint(tokens, expected.loss, expected.low, expected.high))
    end = curve[-1]
    return Target(float(target.parameters), end.tokens, float(target.plan.layout.tokens_per_step), end.loss, end.low,
                  end.high, curve, target.peak_rate)


def expected_loss(target: TargetRun, laws: Mapping[str, Law], step: int) -> Expected:
    """Return the expected validation loss after a step.

    While the learning rate is at its peak, it is that of the law of the stable phase. It approaches the law of the
    decayed runs in proportion to the fall of the rate.
    """
    tokens = float(target.plan.length.tokens_after(step))
    stable, decayed = (laws[name].predict(target.parameters, tokens) for name in (STABLE, DECAYED))
    part = decayed_part(target, step)
    mixed = [(1 - part) * getattr(stable, name) + part * getattr(decayed, name) for name in ("loss", "low", "high")]
    return Expected(*mixed)


def decayed_part(target: TargetRun, step: int) -> float:
    """Return how far the rate has fallen: 0 at its peak, 1 at the lowest rate of the smaller runs' decays."""
    schedule, lowest = target.schedule, target.decay[1]
    fallen = (1 - schedule(max(0, step - 1)) / schedule.peak) / (1 - lowest) if lowest < 1 else 0.0
    return min(max(fallen, 0.0), 1.0)


def _steps(first: int, last: int) -> list[int]:
    """Return steps from the first to the last: the curve is steep at its begin, and in the decay at its end."""
    parts = [index / _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    return sorted({*(round(first * (last / first) ** part) for part in parts),
                   *(round(first + (last - first) * part) for part in parts)})
