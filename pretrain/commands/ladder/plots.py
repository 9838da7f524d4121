"""The plots of a ladder's page, as SVG to be embedded in HTML."""

from collections.abc import Sequence
from typing import Any

from pretrain.analysis.scaling.ladder_file import DECAYED, Ladder
from pretrain.analysis.svg import svg_element
from pretrain.commands.ladder.cost import Option

_LINE_POINTS = 60


def loss_by_tokens(ladder: Ladder, measured: Sequence[tuple[float, float]]) -> str:
    """Draw losses against tokens: points and law of each model, and the expected curve of the target.

    `measured` has the target's validation losses by tokens, if it has been trained.
    """
    figure, axes = _figure()
    for index, name in enumerate(_models(ladder)):
        points = [point for point in ladder.points if point.run == name]
        ends = [(point.tokens, point.loss) for point in points if point.decayed]
        colour = f"C{index}"
        size = points[0].parameters
        tokens = _between(min(x for x, _ in ends), max(x for x, _ in ends))
        axes.plot(tokens, [ladder.laws[DECAYED].loss(size, each) for each in tokens], color=colour, linewidth=1)
        axes.plot(*zip(*ends, strict=True), "o", color=colour, label=f"{size / 1e6:.3g} M parameters")
        stable = [(point.tokens, point.loss) for point in points if not point.decayed]
        if stable:
            axes.plot(*zip(*stable, strict=True), ".", color=colour, markersize=3)
    curve = ladder.target.curve
    tokens = [point.tokens for point in curve]
    low, high = [point.low for point in curve], [point.high for point in curve]
    axes.fill_between(tokens, low, high, color="black", alpha=0.15, linewidth=0)
    axes.plot(tokens, [point.loss for point in curve], "k-", linewidth=1, label="target, expected")
    if measured:
        axes.plot(*zip(*measured, strict=True), "k*", label="target, measured")
    axes.set(xscale="log", xlabel="tokens", ylabel="validation loss, nats per token")
    return _svg(figure, axes, "tokens")


def loss_by_parameters(ladder: Ladder, measured: float | None) -> str:
    """Draw losses after each number of tokens against parameters, and the target's with its interval."""
    figure, axes = _figure()
    target, law = ladder.target, ladder.laws[DECAYED]
    sizes = _between(ladder.range.parameters[0], max(target.parameters, ladder.range.parameters[1]))
    for index, tokens in enumerate(sorted({point.tokens for point in ladder.points if point.decayed})):
        points = [(point.parameters, point.loss) for point in ladder.points
                  if point.decayed and point.tokens == tokens]
        axes.plot(*zip(*points, strict=True), "o", color=f"C{index}", label=f"{tokens / 1e6:.3g} M tokens")
        axes.plot(sizes, [law.loss(size, tokens) for size in sizes], color=f"C{index}", linewidth=1)
    axes.errorbar([target.parameters], [target.loss], [[target.loss - target.low], [target.high - target.loss]],
                  fmt="ks", capsize=3, label=f"target, {target.tokens / 1e6:.3g} M tokens, expected")
    if measured is not None:
        axes.plot([target.parameters], [measured], "k*", markersize=9, label="target, measured")
    axes.set(xscale="log", xlabel="parameters without embeddings", ylabel="validation loss, nats per token")
    return _svg(figure, axes, "parameters")


def loss_by_size(ladder: Ladder, options: Sequence[Option], optimal: Option | None, flops: float) -> str:
    """Draw the expected loss of models of several sizes that are trained with the same compute."""
    figure, axes = _figure()
    law = ladder.laws[DECAYED]
    sizes = _between(options[0].parameters, options[-1].parameters)
    expected = [law.predict(size, flops / 6 / size) for size in sizes]
    axes.fill_between(sizes, [each.low for each in expected], [each.high for each in expected], alpha=0.2, linewidth=0)
    axes.plot(sizes, [each.loss for each in expected], label=f"{flops:.3g} FLOPs")
    axes.axvline(ladder.target.parameters, color="black", linewidth=1, label="target")
    if optimal is not None and sizes[0] <= optimal.parameters <= sizes[-1]:
        axes.axvline(optimal.parameters, color="grey", linestyle="--", linewidth=1, label="lowest loss")
    axes.set(xscale="log", xlabel="parameters without embeddings", ylabel="expected loss, nats per token")
    return _svg(figure, axes, "size")


def _models(ladder: Ladder) -> list[str]:
    return list(dict.fromkeys(point.run for point in ladder.points if point.decayed))


def _between(low: float, high: float) -> list[float]:
    """Return numbers at equal factors."""
    return [low * (high / low) ** (index / _LINE_POINTS) for index in range(_LINE_POINTS + 1)]


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, axes: Any, name: str) -> str:
    """Return the SVG. The same data gives the same text; the names of its parts begin with `name`."""
    axes.legend(frameon=False, fontsize="small")
    return svg_element(figure, name)
