"""Summarize a run folder: progress, losses, the unigram entropy of its data for comparison, and the loss curve.

Extensions find hints and expected losses for the curve.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.active_extensions import results_of_steps
from pretrain.analysis.incidents import Incident, incident_lines, incidents_of
from pretrain.analysis.run_table import Columns, Curves, RunTable, as_float, kept_evaluations, kept_rows
from pretrain.analysis.svg import check_plot_target, save_svg
from pretrain.cli import Parser, path
from pretrain.data.data_spec import parse_data_spec
from pretrain.data.token_files.indexed_dataset import read_meta
from pretrain.errors import ConfigError, file_errors, printable
from pretrain.monitor.curve import (
    EVALUATION_KEYS,
    KEYS,
    Curve,
    Expectation,
    Expected,
    Facts,
    Hint,
    expectation_of,
    hints_of_extensions,
    millions_of_tokens,
)
from pretrain.monitor.read_run_folder import is_number, newest_path, newest_start, read_metrics, read_rows
from pretrain.remote import is_url

_MOST_POINTS = 300
_ROWS = 8  # newest rows, whose median is the measured loss, as in the events


def hints_of(table: RunTable) -> list[Hint]:
    """Return what the curve of a run shows: the most important first; none if there are no rows.

    Steps that were trained again later do not count.
    """
    valid, kept = table.evaluations.get("valid", Columns()), kept_rows(table.training)
    newest = kept_evaluations(valid, table.training)
    curve = Curve({key: table.training.column(key)[kept] for key in KEYS},
                  {key: valid.column(key)[newest] for key in EVALUATION_KEYS})
    return hints_of_extensions(curve, Facts.of_record(table.starts[-1] if table.starts else {}))


@dataclass(frozen=True)
class Comparison:
    """The newest losses of a run next to the expected one."""

    tokens: float
    expected: Expected
    measured: float  # training loss, median of 8 rows
    remark: str = ""

    def __str__(self) -> str:
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.expected} at {millions_of_tokens(self.tokens)}, training loss {self.measured:.4f}{remark}"

    @property
    def interval_text(self) -> str:
        """Everything but the expected loss itself."""
        low, high = self.expected.low, self.expected.high
        return f"{low:.4f} to {high:.4f} at {millions_of_tokens(self.tokens)}; training loss {self.measured:.4f}"


def expected_curve(table: RunTable, curves: Curves) -> Curves:
    """Return the expected loss, with its interval, at some of the positions of the training curves; {}: not known."""
    expectation, first_tokens = _expectation(table)
    if expectation is None or "consumed_tokens" not in curves.values:
        return Curves({})
    tokens = curves.values["consumed_tokens"] - first_tokens
    rows = np.unique(np.linspace(0, max(len(tokens) - 1, 0), min(len(tokens), _MOST_POINTS)).astype(int))
    found = {int(row): at for row in rows if (at := _at(expectation, float(tokens[row]))) is not None}
    if not found:
        return Curves({})
    loss, low, high = (np.array([getattr(at, name) for at in found.values()]) for name in ("loss", "low", "high"))
    positions: dict[str, np.ndarray] = {
        key: curves.values[key][list(found)] for key in ("step", "consumed_tokens", "elapsed")
        if key in curves.values}
    return Curves({**positions, "loss": loss}, {"loss": low}, {"loss": high})


def expected_of_run(table: RunTable) -> Curves:
    """Return the expected loss by step and tokens, with its interval; {}: not known."""
    kept = kept_rows(table.training)
    return expected_curve(table, Curves({key: table.training.column(key)[kept] for key in ("step", "consumed_tokens")}))


def newest_comparison(table: RunTable) -> Comparison | None:
    """Compare the newest losses within the curve; None: the run has no curve, or no row within it."""
    expectation, first_tokens = _expectation(table)
    if expectation is None:
        return None
    kept = kept_rows(table.training) & np.isfinite(table.training.column("loss"))
    tokens, losses = (table.training.column(key)[kept] for key in ("consumed_tokens", "loss"))
    for last in range(len(tokens), 0, -1):
        expected = _at(expectation, float(tokens[last - 1]) - first_tokens)
        if expected is not None:
            return Comparison(float(tokens[last - 1]), expected, float(np.median(losses[max(last - _ROWS, 0):last])),
                              expectation.remark)
    return None


def _expectation(table: RunTable) -> tuple[Expectation | None, float]:
    """Return what is expected of the newest start, and the tokens of the data before the run's first one."""
    start: dict[str, Any] = table.starts[-1] if table.starts else {}
    flags = start.get("flags") or {}
    first = as_float(flags.get("first_sample") or 0) * as_float(flags.get("seq_length") or 0)
    return expectation_of(start, table.events), first if math.isfinite(first) else 0.0


def _at(expectation: Expectation, tokens: float) -> Expected | None:
    return expectation.at(tokens) if math.isfinite(tokens) and tokens > 0 else None


@dataclass(frozen=True)
class Summary:
    """Progress and losses of a run. Losses are in nats per token.

    A loss or the speed is None, and the step is 0, if the run has not reported it yet. The unigram entropy is None if
    the .meta.json of the data does not have it.
    """

    step: int  # the last logged training step
    train_steps: int
    loss: float | None  # training loss at `loss_step`
    loss_step: int  # the last logged training step whose loss is finite; 0: none
    valid_loss: float | None  # the mean, if there are several validation sets
    # loss of a model that only knows the token frequencies of --valid_data, or of --train_data without that flag;
    # the mean, if there are several validation sets
    unigram_entropy: float | None
    tokens_per_second: float | None
    named_losses: dict[str, float | None] = field(default_factory=dict)  # loss of each named validation set
    note: str = ""  # --note of the newest start
    expected: Comparison | None = None  # the loss next to the one that an extension expects
    hints: list[Hint] = field(default_factory=list)  # what the curve shows, the most important first
    incidents: list[Incident] = field(default_factory=list)  # what went wrong, what is wrong now first
    results: list[tuple[int, str]] = field(default_factory=list)  # results of examined steps: step, text

    @property
    def below_unigram_entropy(self) -> bool:
        """True if both values are known and the loss is lower: the model has learned more than token frequencies."""
        return None not in (self.valid_loss, self.unigram_entropy) and self.valid_loss < self.unigram_entropy  # type: ignore[operator]


def summarize(run: Path) -> Summary:
    """Read run.json, metrics.jsonl and the .meta.json of the data.

    Raises ConfigError if run.json is missing or damaged, if a .meta.json is damaged, or if a value is not a finite
    number. A missing metrics.jsonl counts as empty, and lines in it that are not valid JSON are skipped.
    """
    start, rows = newest_start(run), read_rows(run / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if row.get("split") == "valid"]
    last, evaluation = training[-1] if training else {}, evaluations[-1] if evaluations else {}
    # null: NaN or infinity
    finite: dict[str, Any] = next((row for row in reversed(training) if row["loss"] is not None), {})
    flags, metrics, table = start["flags"], run / "metrics.jsonl", RunTable(run)
    named = {str(row["split"]): row for row in rows if str(row.get("split")).startswith("valid/")}
    return Summary(step=int(_number(metrics, last, "step") or 0),
                   train_steps=int(_number(run / "run.json", start, "train_steps") or 0),
                   loss=_number(metrics, finite, "loss"), loss_step=int(_number(metrics, finite, "step") or 0),
                   valid_loss=_number(metrics, evaluation, "eval_loss"),
                   unigram_entropy=_unigram_entropy(run, start),
                   tokens_per_second=_number(metrics, last, "tokens_per_second"),
                   named_losses={name: _number(metrics, row, "eval_loss") for name, row in named.items()},
                   note=flags.get("note") or "", expected=newest_comparison(table), hints=hints_of(table),
                   incidents=incidents_of(table), results=results_of_steps(run))


def _unigram_entropy(run: Path, start: dict[str, Any]) -> float | None:
    """Return the mean of the entropies that the .meta.json files of the validation data have; None if one is missing.

    The entropy of a blend of several sources is not known. For data at a URL, the run has recorded it.
    """
    flags = start["flags"]
    train, valid = flags.get("train_data"), flags.get("valid_data")
    if not all(isinstance(value, (str, list, type(None))) for value in (train, valid)):
        return None
    spec = parse_data_spec(train, valid_data=valid)
    prefixes = [prefix for _, prefix in spec.valid] or (list(spec.train) if len(spec.train) == 1 else [])
    if any(map(is_url, prefixes)):
        return _number(run / "run.json", start, "unigram_entropy")
    values = [_number(Path(f"{prefix}.meta.json"), read_meta(prefix) or {}, "entropy_nats") for prefix in prefixes]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def summary_lines(summary: Summary) -> list[str]:
    """Return one line for each value."""
    def text(value: float | None, form: str, unit: str = "") -> str:
        return "not known" if value is None else f"{value:{form}}{unit}"

    mean = f" (mean of {len(summary.named_losses)} sets)" if summary.named_losses else ""
    note = [f"note                  {printable(summary.note)}"] if summary.note else []
    return [*note, f"steps done            {summary.step} of {summary.train_steps}",
            f"training loss         {text(summary.loss, '.4f')}{_not_finite(summary)}",
            *([f"expected loss         {summary.expected}"] if summary.expected is not None else []),
            f"validation loss       {text(summary.valid_loss, '.4f', ' nats per token')}{mean}",
            *(f"  {name:<20}{text(loss, '.4f')}" for name, loss in summary.named_losses.items()),
            f"unigram entropy       {text(summary.unigram_entropy, '.4f', ' nats per token')}",
            f"speed                 {text(summary.tokens_per_second, ',.0f')} tokens/s",
            *(f"hint: {hint}" for hint in summary.hints), *incident_lines(summary.incidents, summary.results)]


def _not_finite(summary: Summary) -> str:
    """Return a note if the last logged steps have no finite loss."""
    if summary.loss_step == summary.step:
        return ""
    if summary.loss is None:
        return ": it is NaN or infinite in all logged steps"
    return f" at step {summary.loss_step}; it is NaN or infinite in all later steps"


def _number(path: Path, row: dict[str, Any], key: str) -> float | None:
    """Return the value of a key; None if it is missing. Raises ConfigError if the value is not a finite number."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{path}: {key}", found=json.dumps(value), expected="a finite number",
                          remedy="correct this value, or remove it from the file")
    return value


def save_loss_plot(run: Path, target: Path) -> None:
    """Draw the training and validation loss of `run` over its steps, and the unigram entropy of its `Summary`.

    The same metrics produce the same file. Raises ConfigError if matplotlib is not installed, if `target` does not end
    with .svg or cannot be written, or if a file of the run cannot be read.
    """
    check_plot_target(target)
    from matplotlib.figure import Figure

    rows, entropy, expected = read_metrics(run), summarize(run).unigram_entropy, expected_of_run(RunTable(run))
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    named = sorted({str(row["split"]) for row in rows if str(row.get("split")).startswith("valid/")})
    mean = "validation loss (mean)" if named else "validation loss"
    for key, split, label, style in (("loss", None, "training loss", "-"), ("eval_loss", "valid", mean, "o"),
                                     *(("eval_loss", name, name, ".") for name in named)):
        found = newest_path([row for row in rows if key in row and row.get("split") == split])
        points = [(row["step"], row[key]) for row in found if is_number(row[key])]  # null: NaN or infinity
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if expected.values:
        axes.fill_between(expected.values["step"], expected.low["loss"], expected.high["loss"], color="grey", alpha=0.3,
                          linewidth=0, label="expected, with its interval")
    if entropy is not None:
        axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend(frameon=False)
    with file_errors(f"--plot {target}", "the file cannot be written: {}"):
        save_svg(figure, target, "loss")


def main() -> int:
    parser = Parser(description="Print progress and losses of a run, and draw its loss curve.")
    parser.add_argument("run", metavar="RUN", type=path, help="run folder (--save of the run)")
    parser.add_argument("--below_unigram_entropy", action="store_true",
                        help="exit with 1 unless the validation loss is below the unigram entropy")
    parser.add_argument("--plot", type=path, metavar="FILE.svg", help="draw the loss curve (needs matplotlib)")
    args = parser.parse_args()
    summary = summarize(args.run)
    print("\n".join(summary_lines(summary)))
    if args.plot is not None:
        save_loss_plot(args.run, args.plot)
    if args.below_unigram_entropy and not summary.below_unigram_entropy:
        print("The validation loss is not below the unigram entropy: the model knows no more than token frequencies.")
        return 1
    return 0
