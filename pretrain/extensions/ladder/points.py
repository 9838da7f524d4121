"""Points of a CSV file, and a backtest: fit the law without the largest models, and predict their losses."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from pretrain.errors import ConfigError, reason_of
from pretrain.extensions.ladder.expected_curve import LEVEL
from pretrain.extensions.ladder.fit import depends_on_size, fit_law
from pretrain.extensions.ladder.ladder_file import Law, Point, Range, Reach
from pretrain.monitor.curve import Expected
from pretrain.stored_json import read_text

COLUMNS = ("run", "parameters", "tokens", "loss")
HELD_OUT = "held_out"
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")
_LARGEST_BYTES = 2**24


def read_points(path: Path, where: str = "--points") -> list[Point]:
    """Read a CSV file with the columns run, parameters, tokens, loss, and optionally held_out (true or false).

    Lines that begin with # are comments. Raises ConfigError.
    """
    try:
        lines = read_text(path, largest_bytes=_LARGEST_BYTES).lstrip("\ufeff").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} {path}", problem=f"it cannot be read: {reason_of(error)}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip() and line[0] != "#"]
    rows = list(csv.reader(line for _, line in numbered))
    header = [name.strip() for name in rows[0]] if rows else []
    known = (*COLUMNS, HELD_OUT)
    for name in header:
        if name not in known or header.count(name) > 1:
            raise ConfigError(f"{where} {path}", problem=f'the column "{name}" is unknown or repeated', word=name,
                              known=known, remedy=f"the columns are {','.join(known)}; the last one is optional")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ConfigError(f"{where} {path}", problem=f"its first line has no column {', '.join(missing)}",
                          remedy=f"begin with the line {','.join(COLUMNS)}")
    points = []
    for (number, _), row in zip(numbered[1:], rows[1:], strict=False):
        try:
            points.append(_point(dict(zip(header, row, strict=True))))
        except ValueError as error:
            problem = str(error) if len(row) == len(header) else f"it has {len(row)} values for {len(header)} columns"
            raise ConfigError(f"{where} {path}, line {number}", problem=problem) from None
    if not points:
        raise ConfigError(f"{where} {path}", problem="it has no points")
    return points


def _point(row: dict[str, str]) -> Point:
    values = {name: word.strip() for name, word in row.items()}
    numbers = []
    for name in COLUMNS[1:]:
        try:
            number = float(values[name])
        except ValueError:
            number = 0.0
        if not (isfinite(number) and number > 0):
            raise ValueError(f'{name} is "{values[name]}"; expected a number above 0')
        numbers.append(number)
    word = values.get(HELD_OUT, "").lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f'{HELD_OUT} is "{word}"; expected true or false')
    parameters, tokens, loss = numbers
    return Point(values["run"], parameters, tokens, loss, held_out=word in _TRUE)


@dataclass(frozen=True)
class Prediction:
    """A hidden point, and what the law of the other points predicts for it."""

    point: Point
    expected: Expected
    reach: Reach

    @property
    def error(self) -> float:
        """The prediction's difference from the measured loss, as a part of it."""
        return self.expected.loss / self.point.loss - 1

    @property
    def is_inside(self) -> bool:
        return self.expected.low <= self.point.loss <= self.expected.high


@dataclass(frozen=True)
class Backtest:
    """The law of the points that are not hidden, and its predictions for those that are."""

    law: Law
    size_only: bool  # the law has no term of D
    fitted: list[Point]
    predictions: list[Prediction]

    def lines(self) -> list[str]:
        """Return the law and the table of the predictions as lines of text."""
        limits = Range.of(self.fitted)
        lines = [f"fitted     {len(self.fitted)} points, N {_range(limits.parameters)}, D {_range(limits.tokens)}",
                 f"law        {law_text(self.law)}; {100 * self.law.noise:.2f}% noise"]
        if self.size_only:
            lines.append("           The tokens are a function of N: the law holds for runs with the same function "
                         "only.")
        width = max(len("hidden run"), *(len(each.point.run) for each in self.predictions))
        lines.append(f"{'hidden run':<{width}}  {'N':>8}  {'D':>8}  {'beyond':>6}  "
                     f"{f'predicted ({LEVEL:.0%} interval)':<27}  measured   error  inside")
        for each in self.predictions:
            point = each.point
            row = f"{point.run:<{width}}  {point.parameters:>8.3g}  {point.tokens:>8.3g}  {each.reach.factor:>5.3g}x  "
            if each.reach.problem():
                lines.append(f"{row}not predicted: too far from the fitted points")
            else:
                lines.append(f"{row}{each.expected!s:<27}  {point.loss:>8.4f}  {100 * each.error:>+5.1f}%  "
                             f"{'yes' if each.is_inside else 'NO'}")
        shown = [each for each in self.predictions if not each.reach.problem()]
        inside = sum(each.is_inside for each in shown)
        furthest = max((each.reach for each in shown), key=lambda reach: reach.factor, default=Reach(1.0, 1.0))
        lines.append(f"inside     {inside} of {len(shown)}; {LEVEL:.0%} are expected")
        return [*lines, f"warning    {warning}"] if (warning := furthest.warning()) else lines


def law_text(law: Law) -> str:
    """Return a law as text."""
    of_tokens = f" + {law.b:.4g} / D^{law.beta:.3f}" if law.b else ""
    bounds = "".join(f"; the fit stopped at the bound of {each}" for each in law.at_bounds())
    return f"L(N{', D' if law.b else ''}) = {law.e:.3f} + {law.a:.4g} / N^{law.alpha:.3f}{of_tokens}{bounds}"


def backtest_of(path: Path) -> Backtest:
    """Do the backtest on the points of a CSV file. Raises ConfigError."""
    points = read_points(path)
    try:
        return backtest(points)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--points {path}", problem=str(error)) from None


def backtest(points: Sequence[Point], *, seed: int = 0, resamples: int = 100) -> Backtest:
    """Fit the law to the points that are not held out, and predict the others.

    If no point is held out, those of the largest model are. If the tokens of all points are a function of N, the law
    has no term of D. Raises ValueError if the points do not determine the law; ConfigError without scipy.
    """
    if not any(point.held_out for point in points):
        largest = max(point.parameters for point in points)
        points = [replace(point, held_out=point.parameters == largest) for point in points]
    fitted, hidden = ([point for point in points if point.held_out == which] for which in (False, True))
    if not fitted:
        raise ValueError("all points are held out, or of the same model: none is left to fit")
    size_only = len({point.parameters for point in fitted}) > 1 and depends_on_size(points)
    law = fit_law(fitted, seed=seed, resamples=resamples, size_only=size_only)
    limits = Range.of(fitted)
    return Backtest(law, size_only, fitted, [
        Prediction(point, law.predict(point.parameters, point.tokens),
                   Reach.of(limits, point.parameters, limits.tokens[1] if size_only else point.tokens))
        for point in hidden])


def _range(limits: list[float]) -> str:
    return f"{limits[0]:.3g} to {limits[1]:.3g}"
