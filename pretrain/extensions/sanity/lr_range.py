"""Learning-rate range test (Smith, arXiv 1506.01186): rates, smoothed losses, and the suggested rate. No torch.

The rate grows exponentially from step to step. As long as it is far too low, the loss hardly changes; then it falls,
and at too high a rate it rises again.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.analysis.svg import save_svg

SMOOTHING = 0.8  # weight of the earlier losses in the moving average
DIVERGED = 1.2  # the run has diverged if its loss is this multiple of the lowest smoothed one
_LEAST_FALL = 0.02  # fraction of the first loss: a smaller fall of the average, as with random tokens, is none
_SAFETY = 10.0  # the suggested rate is at most the rate of divergence divided by this
_ROWS = 20  # rows of the printed table


@dataclass(frozen=True)
class Point:
    """One step of the test."""

    lr: float
    loss: float  # before the update with this rate
    smoothed: float


@dataclass(frozen=True)
class RangeTest:
    """The steps of a test, and what they suggest. A rate is None if the test did not find it."""

    points: list[Point]
    steepest: float | None  # rate at which the smoothed loss falls fastest per decade
    diverged_at: float | None  # first rate at which the loss had diverged
    suggested: float | None  # the lower one of `steepest` and a tenth of `diverged_at`


def rate_at(step: int, *, low: float, high: float, steps: int) -> float:
    """Return the rate of step number `step`, from 0: `low` in the first step, `high` in the last one."""
    return low * (high / low) ** (step / (steps - 1))


class Smoother:
    """Exponential moving average of losses, corrected for its start at 0."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, loss: float) -> float:
        """Add a loss, and return the average."""
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * loss
        self._count += 1
        return self._sum / (1 - SMOOTHING ** self._count)


def has_diverged(points: list[Point]) -> bool:
    """Return whether the test is over: the loss is not finite, or two in a row or their average are far too high."""
    last, high = points[-1], _first_high(points)
    return not math.isfinite(last.loss) or last.smoothed > _limit(points) or high < len(points) - 1


def _limit(points: list[Point]) -> float:
    """Return the loss above which the run has diverged."""
    return DIVERGED * min((point.smoothed for point in points if math.isfinite(point.smoothed)), default=math.inf)


def _first_high(points: list[Point]) -> int:
    """Return the index of the first of the losses at the end that are not finite or above the limit."""
    limit, first = _limit(points), len(points)
    while first > 0 and not points[first - 1].loss <= limit:  # also for NaN
        first -= 1
    return first


def evaluate_range(points: list[Point]) -> RangeTest:
    """Find the steepest descent, the divergence and the suggested rate.

    A high loss counts as divergence also in the last step only, where its average may be low. The rate of the first
    high loss is the rate of divergence.
    """
    high = min(_first_high(points), len(points) - 1 if has_diverged(points) else len(points))
    diverged_at = points[high].lr if high < len(points) else None
    finite = [point for point in points if math.isfinite(point.smoothed)]
    lowest = min(range(len(finite)), key=lambda i: finite[i].smoothed, default=0)
    slopes = {i: (finite[i + 1].smoothed - finite[i - 1].smoothed) / math.log10(finite[i + 1].lr / finite[i - 1].lr)
              for i in range(1, min(lowest + 1, len(finite) - 1))}
    best = min(slopes, key=lambda i: slopes[i], default=None)
    has_fallen = best is not None and finite[lowest].smoothed < (1 - _LEAST_FALL) * finite[0].smoothed
    steepest = finite[best].lr if best is not None and has_fallen else None
    suggested = steepest
    if steepest is not None and diverged_at is not None:
        suggested = min(steepest, diverged_at / _SAFETY)
    return RangeTest(points, steepest, diverged_at, suggested)


def range_lines(test: RangeTest) -> list[str]:
    """Return the table of rates and losses, and the suggested rate."""
    stride = max(1, -(-len(test.points) // _ROWS))
    shown = sorted({*range(0, len(test.points), stride), len(test.points) - 1})
    lines = [f"{'rate':>10}  {'loss':>9}  {'smoothed':>9}"]
    lines += [f"{point.lr:>10.2e}  {point.loss:>9.4f}  {point.smoothed:>9.4f}"
              for point in (test.points[i] for i in shown)]
    remedy = "use a higher --to" if test.diverged_at is None else \
        "use a lower --from, or look at the data: random tokens cannot be learned (`ds-pretrain inspect`)"
    lines.append(f"steepest descent    {_rate(test.steepest, f'not found: the loss did not fall; {remedy}')}")
    lines.append(f"divergence          {_rate(test.diverged_at, 'not reached: --to may be higher')}")
    if test.suggested is not None:
        lines.append(f"suggested peak rate {test.suggested:.2e}: the lower one of the steepest descent and a tenth "
                     "of the divergence")
    return lines


def _rate(rate: float | None, otherwise: str) -> str:
    return otherwise if rate is None else f"{rate:.2e}"


def write_range_json(target: Path, test: RangeTest) -> None:
    """Write the test as JSON; losses that are not finite are null."""
    values = asdict(test)
    for point in values["points"]:
        point |= {key: value if math.isfinite(value) else None for key, value in point.items()}
    target.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def plot_range(target: Path, test: RangeTest) -> None:
    """Draw the losses over the rates as a self-contained SVG file. The same test produces the same file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    finite = [point for point in test.points if math.isfinite(point.smoothed)]
    rates = [point.lr for point in finite]
    axes.plot(rates, [point.loss for point in finite], ".", markersize=4, color="lightgrey", label="loss")
    axes.plot(rates, [point.smoothed for point in finite], label="smoothed loss")
    for rate, style, name in ((test.suggested, "-", "suggested"), (test.steepest, "--", "steepest descent"),
                              (test.diverged_at, ":", "divergence")):
        if rate is not None:
            axes.axvline(rate, color="grey", linestyle=style, linewidth=1, label=f"{name}: {rate:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="nats per token")
    axes.legend(frameon=False)
    save_svg(figure, target, "rate")
