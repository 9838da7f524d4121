"""ladder.html: the expected loss of the target, what it depends on, and the runs behind it, as one page.

It also has times and alternatives of the target's run: other numbers of tokens, and other sizes for the same compute.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from pretrain.analysis.svg import svg_element
from pretrain.errors import ConfigError
from pretrain.extensions.ladder.expected_curve import LEVEL, counted_parameters
from pretrain.extensions.ladder.fit import compute_optimal
from pretrain.extensions.ladder.ladder_file import DECAYED, Ladder, Law, Point, Reach
from pretrain.extensions.ladder.plan import Plan, duration_text
from pretrain.extensions.ladder.points import law_text
from pretrain.extensions.ladder.target import MUP, TargetRun, scaled_config
from pretrain.extensions.ladder.train import validation_losses
from pretrain.memory.compare.compare import predict, tokens_text
from pretrain.memory.step_time.calibrate import calibrate, predict_run
from pretrain.memory.step_time.measured_run import read_measured_run
from pretrain.model.description import ModelConfig
from pretrain.monitor.curve import Expected

StepSeconds = Callable[[ModelConfig], float]
_TOKEN_FACTORS = (0.25, 0.5, 1.0, 2.0)
_SIZE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # size factors of the target's parameters
_FLOPS_PER_PARAMETER = 6  # and token, forward and backward
_LINE_POINTS = 60
_LARGEST_USUAL_EXPONENT = 1.0
_LARGEST_USUAL_NOISE = 0.01  # in the logarithm of the loss
_STYLE = ("body { font: 15px sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em } "
          "table { border-collapse: collapse } td, th { padding: 0.15em 0.9em; text-align: right; "
          "border-bottom: 1px solid #ddd } td:first-child, th:first-child { text-align: left } "
          "code { background: #f2f2f2 } figure { margin: 1em 0 }")


@dataclass(frozen=True)
class Option:
    """A run that could be trained instead of the target's, and its expected loss at the end of a decay."""

    parameters: float
    tokens: float
    expected: Expected
    reach: Reach
    seconds: float | None  # None: not known


def step_seconds(target: TargetRun, plan: Plan, folder: Path, gpu: str | None) -> StepSeconds | None:
    """Return a function that predicts the step time of a model in the target's layout; None if it cannot.

    Without `gpu`, the model of the step time is calibrated with the smaller runs.
    """
    if gpu is not None:
        def on_gpus(model: ModelConfig) -> float:
            time = predict(replace(target.plan, model=model), gpu).time
            assert time is not None  # the model is known
            return time.total_seconds
        return on_gpus
    paths = [str(folder / "runs" / model.name) for model in (plan.models[0], plan.models[-1])]
    try:
        parameters, measured = calibrate(paths).parameters, read_measured_run(paths[-1])
    except ConfigError:
        return None
    return lambda model: predict_run(replace(measured, layout=target.plan.layout, model=model),
                                     parameters).total_seconds


def token_options(target: TargetRun, ladder: Ladder, seconds: StepSeconds | None) -> list[Option]:
    """Return the target's model with other numbers of tokens."""
    return [_option(ladder, target, target.parameters, factor * target.tokens, target.plan.model, seconds)
            for factor in _TOKEN_FACTORS]


def size_options(target: TargetRun, ladder: Ladder, seconds: StepSeconds | None) -> list[Option]:
    """Return models in the target's proportions, with the tokens that need the compute of the target's run."""
    flops, heads = compute_of(target), target.plan.model.num_heads
    ratio = heads // target.plan.model.num_kv_heads
    found: dict[int, Option] = {}
    for factor in _SIZE_FACTORS:
        number = max(1, round(heads * factor ** (1 / 3)))
        if ratio > 1:
            number = max(ratio, round(number / ratio) * ratio)
        model = target.plan.model if number == heads else scaled_config(
            target.plan.model, heads=number, kv_heads=max(1, number // ratio),
            layers=max(1, round(target.plan.model.num_layers * number / heads)))
        size = counted_parameters(model)
        found[size] = _option(ladder, target, size, flops / _FLOPS_PER_PARAMETER / size, model, seconds)
    return [found[size] for size in sorted(found)]


def optimal_option(target: TargetRun, ladder: Ladder) -> Option | None:
    """Return the size with the lowest loss for the compute of the target's run; None if the law has no optimum."""
    try:
        parameters, tokens = compute_optimal(ladder.laws[DECAYED], compute_of(target))
    except ValueError:
        return None
    return _option(ladder, target, parameters, tokens, target.plan.model, None)


def compute_of(target: TargetRun) -> float:
    """Return the compute of the target's run, 6 N D floating-point operations."""
    return float(_FLOPS_PER_PARAMETER * target.parameters * target.tokens)


def _option(ladder: Ladder, target: TargetRun, parameters: float, tokens: float, model: ModelConfig,
            seconds: StepSeconds | None) -> Option:
    laws: Mapping[str, Law] = ladder.laws
    steps = tokens / target.plan.layout.tokens_per_step
    return Option(parameters, tokens, laws[DECAYED].predict(parameters, tokens),
                  Reach.of(ladder.range, parameters, tokens), seconds(model) * steps if seconds else None)


def page(title: str, target: TargetRun, plan: Plan, ladder: Ladder, folder: Path,
         gpu: str | None) -> tuple[list[str], str]:
    """Return the results in a few sentences, and the page as HTML."""
    seconds = step_seconds(target, plan, folder, gpu)
    tokens, sizes = token_options(target, ladder, seconds), size_options(target, ladder, seconds)
    optimal = optimal_option(target, ladder)
    measured = target_losses(target)
    where = f"{target.plan.layout.world_size} {gpu}" if gpu else "this machine"
    lines = summary_lines(target, ladder, tokens, optimal)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        _figure(loss_by_tokens(ladder, list(measured.items())),
                "Large points: at the end of a decay; small points: in the stable phase. The band is the "
                f"{LEVEL:.0%} interval of the target's expected loss, under its own schedule."),
        _figure(loss_by_parameters(ladder, measured.get(float(target.tokens))), "Lines: the law of the decayed runs."),
        f"<h2>Other numbers of tokens</h2><p>The target's model on {escape(where)}, with a decay at the end:</p>",
        _options_table(tokens, target),
        f"<h2>Other sizes, same compute</h2><p>{compute_of(target):.3g} FLOPs (6 N D) in models of the target's "
        f"proportions, on {escape(where)}:</p>",
        _options_table(sizes, target),
        _figure(loss_by_size(ladder, sizes, optimal, compute_of(target)), "Expected loss at equal compute."),
        "<h2>How far the law reaches</h2>",
        *(f"<p>{escape(line)}</p>" for line in reach_lines(target, ladder)),
        "<h2>The runs behind it</h2>",
        f"<p>{escape(_runs_text(target, plan))}</p>",
        *(f"<p>Law of the {name} runs: {escape(law_text(law))}; noise {100 * law.noise:.2f}%</p>"
          for name, law in ladder.laws.items()),
        _points_table([point for point in ladder.points if point.decayed], ladder),
        "<h2>During the run</h2><p>This shows the band in the report, and records an event if the run leaves it:</p>",
        f"<pre>ds-pretrain --config {escape(title)} --expected_curve {escape(str(folder / 'ladder.json'))}</pre>",
    ]
    body = "\n".join(parts)
    return lines, f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n' \
           f"<style>{_STYLE}</style>\n{body}\n</html>\n"


def summary_lines(target: TargetRun, ladder: Ladder, tokens: Sequence[Option], optimal: Option | None) -> list[str]:
    """Return the results in a few sentences, for the page and the terminal."""
    found = ladder.target
    half = next(each for each in tokens if each.tokens == 0.5 * target.tokens)
    end = next(each for each in tokens if each.tokens == target.tokens)
    lines = [f"expected loss of the target ({tokens_text(target.parameters)} parameters without embeddings, "
             f"{tokens_text(target.tokens)} tokens): {found.loss:.4f} nats per token, {found.low:.4f} to "
             f"{found.high:.4f} with a probability of {LEVEL:.0%}",
             f"half of the data: {half.expected.loss:.4f}, {half.expected.loss - end.expected.loss:.4f} more"]
    if optimal is None:
        lines.append("compute-optimal size: none, because the law does not depend on both parameters and tokens")
    else:
        lines.append(f"lowest loss for the compute of the target, 6 N D: {optimal.expected.loss:.4f}, with "
                     f"{tokens_text(optimal.parameters)} parameters and {tokens_text(optimal.tokens)} tokens"
                     + ("; too far from the runs to be trusted" if optimal.reach.problem() else ""))
    if (seconds := end.seconds) is not None:
        hours = seconds / 3600 * target.plan.layout.world_size
        lines.append(f"predicted time of the target: {duration_text(seconds)}, {hours:,.3g} device-hours")
    if (loss := target_losses(target).get(float(target.tokens))) is not None:
        inside = "inside" if found.low <= loss <= found.high else "OUTSIDE"
        lines.append(f"measured by the run in {target.plan.args.save}: {loss:.4f}, {inside} of the interval, "
                     f"{loss - found.loss:+.4f} ({loss / found.loss - 1:+.2%})")
    return lines + [f"warning: {each}" for each in warnings_of(target, ladder)]


def reach_lines(target: TargetRun, ladder: Ladder) -> list[str]:
    """Describe the range of the points, and warn about a far extrapolation."""
    limits, reach = ladder.range, Reach.of(ladder.range, target.parameters, target.tokens)
    sizes, tokens = (" to ".join(map(tokens_text, pair)) for pair in (limits.parameters, limits.tokens))
    lines = [f"The points have {sizes} parameters, and {tokens} tokens; {reach}."]
    lines += [f"Warning: {each}." for each in warnings_of(target, ladder)]
    if target.scaling != MUP:
        lines.append("The learning rates of the smaller models follow GPT-3's table, and not a search: a target whose "
                     "rate is better or worse tuned has another loss. With mup_base_width one rate fits all widths.")
    if not target.schedule.wsd_steps:
        lines.append("The smaller runs decay the learning rate in their last 20%; the target's schedule is "
                     f"{target.schedule.kind}, whose loss at the end may differ.")
    return lines


def warnings_of(target: TargetRun, ladder: Ladder) -> list[str]:
    """Warn about a far extrapolation, and about a law that does not describe the points well."""
    law, reach = ladder.laws[DECAYED], Reach.of(ladder.range, target.parameters, target.tokens)
    found = [reach.warning()] if reach.warning() else []
    if law.alpha > _LARGEST_USUAL_EXPONENT and law.a:
        found.append(f"alpha is {law.alpha:.2f}, and published ones are at most 0.7: the larger models reach hardly "
                     "lower losses; they need more --tokens, or another learning rate")
    if law.noise > _LARGEST_USUAL_NOISE:
        found.append(f"the law misses the losses by {law.noise:.1%}: expect errors of this size and larger ones")
    return found


def target_losses(target: TargetRun) -> dict[float, float]:
    """Return the validation losses of the target's run by tokens, if it has been trained."""
    losses = validation_losses(target, Path(target.plan.args.save))
    return {float(target.plan.length.tokens_after(step)): loss for step, loss in losses.items()}


def _runs_text(target: TargetRun, plan: Plan) -> str:
    shorter, longest = ", ".join(map(tokens_text, plan.tokens[:-1])), tokens_text(plan.tokens[-1])
    return f"{len(plan.models)} models of the target's family ({target.plan.model.architecture}), each trained with " \
           f"{longest} tokens in steps of {plan.batch.tokens:,}; runs of {shorter} tokens branch " \
           f"off its stable phase. Learning rate: {target.scaling}; evaluations: {plan.eval_steps} batches."


def _options_table(options: Iterable[Option], target: TargetRun) -> str:
    rows = []
    for option in options:
        is_target = (option.parameters, option.tokens) == (target.parameters, target.tokens)
        known = option.seconds is not None and not option.reach.problem()
        rows.append((tokens_text(option.parameters) + (" (target)" if is_target else ""), tokens_text(option.tokens),
                     "too far" if option.reach.problem() else f"{option.expected.loss:.4f}",
                     "" if option.reach.problem() else f"{option.expected.low:.4f} to {option.expected.high:.4f}",
                     duration_text(option.seconds or 0) if known else "-",
                     f"{(option.seconds or 0) / 3600 * target.plan.layout.world_size:,.3g}" if known else "-"))
    return _table(("parameters", "tokens", "expected loss", f"{LEVEL:.0%} interval", "time", "device-hours"), rows)


def _points_table(points: Iterable[Point], ladder: Ladder) -> str:
    rows = []
    for point in points:
        law = ladder.laws[DECAYED].loss(point.parameters, point.tokens)
        rows.append((point.run, f"{point.parameters:,.0f}", f"{point.tokens:,.0f}", f"{point.loss:.4f}", f"{law:.4f}",
                     f"{law / point.loss - 1:+.2%}"))
    return _table(("run", "parameters", "tokens", "loss", "law", "difference"), rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _figure(svg: str, caption: str) -> str:
    return f'<figure role="img" aria-label="{escape(caption)}">{svg}<figcaption>{escape(caption)}</figcaption></figure>'


def loss_by_tokens(ladder: Ladder, measured: Sequence[tuple[float, float]]) -> str:
    """Draw losses against tokens: points and law of each model, and the expected curve of the target.

    `measured` has the target's validation losses by tokens, if it has been trained.
    """
    figure, axes = _new_plot()
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
    figure, axes = _new_plot()
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
    figure, axes = _new_plot()
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


def _new_plot() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, axes: Any, name: str) -> str:
    """Return the SVG. The same data gives the same text; the names of its parts begin with `name`."""
    axes.legend(frameon=False, fontsize="small")
    return svg_element(figure, name)
