"""Whether the runs of a recipe have the expected results, and a plot of their losses.

Each kind of expectation is a dataclass, whose fields are the keys of an entry of `expect` in recipe.yaml.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from pretrain.analysis.svg import save_svg
from pretrain.commands.small_runs import Curve
from pretrain.extensions.recipes.curves import Result
from pretrain.extensions.recipes.sweeps import CriticalBatch, Optimum
from pretrain.extensions.recipes.tables import Activations, Table


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
