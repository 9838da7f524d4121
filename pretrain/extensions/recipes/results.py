"""Compare the runs of a recipe with its expected results, and plot their losses.

Each kind of expectation is a dataclass, whose fields are the keys of an entry of `expect` in recipe.yaml. In a sweep,
the runs SWEEP-NUMBER differ in one number, such as the learning rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from pretrain.analysis.svg import save_svg
from pretrain.commands.small_runs import Curve
from pretrain.errors import format_number
from pretrain.extensions.recipes.tables import Activations, Result, Table, runs_of

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


@dataclass(frozen=True)
class Between:
    """The last validation loss of a run is inside of a band around the published one.

    A published curve is a mapping from steps to losses; with `by_tokens`, from consumed tokens to losses.
    """

    run: str
    between: list[float]
    published: float | dict[int, float] | None = None
    by_tokens: bool = False

    def names(self) -> list[str]:
        return [self.run]

    def result(self, curves: Mapping[str, Curve]) -> Result:
        found = curves[self.run].final
        low, high = self.between
        text = f"{self.run}: validation loss {_text(found)}, expected {self.band_text()}"
        return Result(found is not None and low <= found <= high, text)

    def band_text(self) -> str:
        return f"{self.between[0]:g} to {self.between[1]:g}{self._published_text()}"

    def _published_text(self) -> str:
        if not isinstance(self.published, dict):
            return "" if self.published is None else f"; published: {self.published:g}"
        last = max(self.published)
        return f"; published: {self.published[last]:g} at {f'{last:.3g} tokens' if self.by_tokens else f'step {last}'}"

    def published_points(self, curve: Curve) -> list[tuple[float, float]]:
        """Return the points of the published curve, (step, loss), up to the last step of the run."""
        if not isinstance(self.published, dict) or not curve.training:
            return []
        last = max(curve.training)
        step_per_unit = last / curve.tokens[last] if self.by_tokens else 1.0
        return [(at * step_per_unit, loss) for at, loss in sorted(self.published.items()) if at * step_per_unit <= last]


@dataclass(frozen=True)
class OneCurve:
    """The training losses of several runs are equal at each step, up to a difference."""

    one_curve: list[str]
    within: float

    def names(self) -> list[str]:
        return self.one_curve

    def result(self, curves: Mapping[str, Curve]) -> Result:
        losses = [curves[name].training for name in self.one_curve]
        steps = losses[0].keys()
        if not steps or any(each.keys() != steps for each in losses):
            return Result(False, f"{', '.join(self.one_curve)}: they have not logged the same steps")
        worst = max(max(each[step] for each in losses) - min(each[step] for each in losses) for step in steps)
        text = f"{', '.join(self.one_curve)}: the training losses of {len(steps)} steps differ by at most " \
               f"{worst:.2g}, expected {self.within:g}"
        return Result(worst <= self.within, text)


@dataclass(frozen=True)
class Lower:
    """The last validation loss of a run is lower than that of another one, by at least `by` (may be negative)."""

    lower: str
    than: str
    by: float = 0.0

    def names(self) -> list[str]:
        return [self.lower, self.than]

    def result(self, curves: Mapping[str, Curve]) -> Result:
        low, high = curves[self.lower].final, curves[self.than].final
        text = f"{self.lower}: validation loss {_text(low)}, {self.than}: {_text(high)}, " \
               f"expected at most {self.than}{f' {-self.by:+g}' if self.by else ''}"
        return Result(low is not None and high is not None and low <= high - self.by, text)


# a value that `build` takes apart
Expectation = Union[Between, OneCurve, Lower, Optimum, CriticalBatch, Table, Activations]  # noqa: UP007


def _text(loss: float | None) -> str:
    return "not known" if loss is None else f"{loss:.4f}"


def save_plot(target: Path, title: str, curves: Mapping[str, Curve], expectations: Sequence[Expectation]) -> bool:
    """Draw the sweeps; without any, the losses of all runs and the published ones with their bands.

    Returns False without runs, or without matplotlib.
    """
    if not curves:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    sweeps = [each for each in expectations if isinstance(each, Optimum | CriticalBatch)]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(sweeps)), squeeze=False, sharey=True)[0]
    if not sweeps:
        _draw_losses(panels[0], curves, expectations)
    for axes, sweep in zip(panels, sweeps, strict=False):
        sweep.draw(axes, curves)
    for axes in panels:
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize="medium")
    save_svg(figure, target, title)
    return True


def _draw_losses(axes: Any, curves: Mapping[str, Curve], expectations: Sequence[Expectation]) -> None:
    for name, curve in curves.items():
        (line,) = axes.plot(*zip(*sorted(curve.training.items()), strict=True), linewidth=0.8, label=name)
        axes.plot(*zip(*sorted(curve.validation.items()), strict=True), "o", color=line.get_color())
    for each in expectations:
        if isinstance(each, Between):
            axes.axhspan(*each.between, color="grey", alpha=0.2)
            if isinstance(each.published, float | int):
                axes.axhline(each.published, color="grey", linestyle="--", linewidth=1, label="published")
            elif points := each.published_points(curves[each.run]):
                axes.plot(*zip(*points, strict=True), "s--", color="grey", linewidth=1, label="published")
    axes.set(xlabel="step", ylabel="nats per token")
