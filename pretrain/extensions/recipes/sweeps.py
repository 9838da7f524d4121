"""Expected results of sweeps: runs SWEEP-NUMBER that differ in one number, such as the learning rate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.commands.small_runs import Curve
from pretrain.errors import format_number
from pretrain.extensions.recipes.curves import Result, runs_of

_FITTED_PER_OCTAVE = 64  # candidates of the critical batch size between B and 2 B


@dataclass(frozen=True)
class Optimum:
    """The number with the lowest last validation loss, such as the best learning rate, of several sweeps.

    It differs from that of the first sweep by at most a factor (`within`), or for the last sweep by at least a factor
    (`moves_by`). A number at the end of its sweep is no optimum.
    """

    optimum: list[str]
    within: float = math.inf
    moves_by: float = 1.0

    def names(self) -> list[str]:
        return self.optimum

    def result(self, curves: Mapping[str, Curve]) -> Result:
        best = {sweep: _best(_final_losses(sweep, curves)) for sweep in self.optimum}
        text = "lowest validation loss at " + ", ".join(
            f"{number:g} ({sweep})" if number else f"an end of {sweep}" for sweep, number in best.items())
        text += f", expected within a factor of {self.within:g}" if math.isfinite(self.within) else ""
        text += f", expected to move by a factor of {self.moves_by:g}" if self.moves_by > 1 else ""
        found = [number for number in best.values() if number]
        if len(found) < len(best):
            return Result(False, text)
        factors = [max(number / found[0], found[0] / number) for number in found]
        return Result(max(factors) <= self.within * 1.001 and factors[-1] >= self.moves_by / 1.001, text)

    def draw(self, axes: Any, curves: Mapping[str, Curve]) -> None:
        """Draw loss against number, a line for each sweep."""
        for sweep in self.optimum:
            losses = _final_losses(sweep, curves)
            (line,) = axes.plot(*zip(*losses.items(), strict=True), ".-", linewidth=1, label=sweep)
            if best := _best(losses):
                axes.plot(best, losses[best], "o", color=line.get_color())
        axes.set_xscale("log", base=2)
        axes.set(xlabel="learning rate", ylabel="validation loss")


def _final_losses(sweep: str, curves: Mapping[str, Curve]) -> dict[float, float]:
    return {number: curve.final for number, curve in runs_of(sweep, curves).items() if curve.final is not None}


def _best(losses: Mapping[float, float]) -> float | None:
    """Return the number with the lowest loss; None if it is the first or the last one."""
    numbers = list(losses)
    best = min(numbers, key=lambda number: losses[number], default=None)
    return best if best in numbers[1:-1] else None


@dataclass(frozen=True)
class CriticalBatch:
    """The critical batch size that follows from a sweep of batch sizes, and the noise scale that a run measured.

    The number of a run is its batch size in samples. Sweeps differ in the learning rate: the best one counts for each
    batch size. S steps with E = B S samples reach the loss. McCandlish et al. 2018 (arXiv 1812.06162), equation 2.11:
    (S / Smin - 1) (E / Emin - 1) = 1. The critical batch size is Emin / Smin, and S = Smin (1 + critical batch / B).
    """

    critical_batch: list[str]
    loss: float
    noise_scale_of: str
    within: float

    def names(self) -> list[str]:
        return [*self.critical_batch, self.noise_scale_of]

    def result(self, curves: Mapping[str, Curve]) -> Result:
        points, measured = self._points(curves), self._noise_scale(curves)
        if len(points) < 3 or measured is None:
            return Result(False, f"{len(points)} batch sizes reach the validation loss {self.loss:g} before the end of "
                                 f"their runs, expected 3; noise scale: {measured or 'not known'}")
        fewest_steps, batch = fit_critical_batch(points)
        text = f"critical batch size {format_number(batch)} samples (at least {format_number(fewest_steps)} steps " \
               f"and {format_number(fewest_steps * batch)} samples to validation loss {self.loss:g}), measured noise " \
               f"scale {format_number(measured)} samples, expected within a factor of {self.within:g}"
        return Result(max(batch / measured, measured / batch) <= self.within, text)

    def _points(self, curves: Mapping[str, Curve]) -> dict[float, float]:
        """Return the fewest steps to the loss by batch size."""
        points: dict[float, float] = {}
        for sweep in self.critical_batch:
            for batch, curve in runs_of(sweep, curves).items():
                if (steps := curve.steps_to(self.loss)) is not None:
                    points[batch] = min(steps, points.get(batch, math.inf))
        return dict(sorted(points.items()))

    def _noise_scale(self, curves: Mapping[str, Curve]) -> float | None:
        """Return the noise scale where the run reaches the loss."""
        curve = curves[self.noise_scale_of]
        steps = curve.steps_to(self.loss)
        if steps is None or not curve.noise_scale:
            return None
        return curve.noise_scale[min(curve.noise_scale, key=lambda step: abs(step - steps))]

    def draw(self, axes: Any, curves: Mapping[str, Curve]) -> None:
        """Draw samples against steps, and the fitted curve."""
        points = self._points(curves)
        axes.loglog(list(points.values()), [batch * steps for batch, steps in points.items()], "o")
        for batch, steps in points.items():
            axes.annotate(f"{batch:g}", (steps, batch * steps), textcoords="offset points", xytext=(5, 5))
        if len(points) > 1:
            fewest_steps, critical = fit_critical_batch(points)
            batches = [min(points) * (max(points) / min(points)) ** (i / 50) for i in range(51)]
            steps_of = [fewest_steps * (1 + critical / batch) for batch in batches]
            axes.plot(steps_of, [s * batch for s, batch in zip(steps_of, batches, strict=True)], linewidth=1,
                      label=f"fit: critical batch {critical:.0f}")
        axes.set(xlabel=f"steps to validation loss {self.loss:g}", ylabel="samples")


def fit_critical_batch(steps_by_batch: Mapping[float, float]) -> tuple[float, float]:
    """Return (Smin, critical batch size) with the least squared error of log S."""
    def errors(critical: float) -> list[float]:
        return [math.log(steps / (1 + critical / batch)) for batch, steps in steps_by_batch.items()]

    def spread(critical: float) -> float:
        values = errors(critical)
        return sum((value - sum(values) / len(values)) ** 2 for value in values)

    low, high = min(steps_by_batch) / 16, max(steps_by_batch) * 16
    count = math.ceil(math.log2(high / low) * _FITTED_PER_OCTAVE)
    critical = min((low * (high / low) ** (i / count) for i in range(count + 1)), key=spread)
    values = errors(critical)
    return math.exp(sum(values) / len(values)), critical
