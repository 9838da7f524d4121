"""Points of a CSV file; backtests on published loss tables without their largest models; limits of the reach."""

import dataclasses
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from pretrain.extensions.ladder.ladder_file import (
    LARGEST_EXPONENT,
    LARGEST_FACTOR,
    SMALLEST_TERM,
    WARN_FACTOR,
    Law,
    Range,
    Reach,
)
from pretrain.extensions.ladder.points import Backtest, backtest, law_text, read_points
from tests.support.rejection import rejection

PUBLISHED = Path(__file__).parent / "published"


def without_larger(path: Path, parameters: float) -> Backtest:
    """Backtest a table whose models with more parameters are hidden."""
    points = [dataclasses.replace(point, held_out=point.parameters > parameters) for point in read_points(path)]
    return backtest(points, resamples=15 if len(points) > 10 else 100)


@pytest.mark.parametrize(("name", "largest", "size_only", "hidden", "worst"), [
    ("olmo", 1e9, False, 12, 0.0285),  # fitted: 190M to 760M
    ("olmo", 2e9, False, 7, 0.0325),
    ("olmo", 5e9, False, 2, 0.005),
    ("pythia", 1e9, True, 4, 0.005),
    ("cerebras", 2e9, True, 3, 0.065),
    ("cerebras", 3e9, True, 2, 0.018),
])
def test_largest_models_of_published_families(name, largest, size_only, hidden, worst):
    """All hidden losses are in their intervals, and the errors are at most those of the table in README.md."""
    found = without_larger(PUBLISHED / f"{name}.csv", largest)
    assert found.size_only is size_only
    assert len(found.predictions) == hidden
    for each in found.predictions:
        assert each.is_inside, each
        assert abs(each.error) < worst, each


@pytest.mark.skipif("CHINCHILLA_POINTS" not in os.environ, reason="README.md describes how to get the points")
@pytest.mark.parametrize(("largest", "hidden", "inside", "worst"), [
    (3e8, 186, 180, 0.065), (1e9, 122, 90, 0.045), (3e9, 23, 15, 0.036)])
def test_largest_models_of_chinchilla(largest, hidden, inside, worst):
    """About as many losses are in their intervals as in the table in README.md."""
    found = without_larger(Path(os.environ["CHINCHILLA_POINTS"]), largest)
    assert len(found.predictions) == hidden
    assert sum(each.is_inside for each in found.predictions) >= inside
    assert max(abs(each.error) for each in found.predictions) < worst


def test_lines_of_a_table():
    """Without held-out points, the largest model is hidden."""
    points = [dataclasses.replace(point, held_out=False) for point in read_points(PUBLISHED / "pythia.csv")]
    lines = backtest(points, resamples=25).lines()
    assert lines[0] == "fitted     7 points, N 1.89e+07 to 6.44e+09, D 3e+11 to 3e+11"
    assert lines[1].startswith("law        L(N) = 1.142 + 26.46 / N^0.177; 0.54% noise")
    assert "The tokens are a function of N" in lines[2]
    assert lines[4].split()[:4] == ["12B", "1.13e+10", "3e+11", "1.76x"]
    assert lines[4].split()[-3:] == ["1.5820", "-0.1%", "yes"]
    assert lines[-1] == "inside     1 of 1; 90% are expected"
    far = [dataclasses.replace(points[-1], parameters=2e11, held_out=True), *points]
    assert backtest(far, resamples=2).lines()[-1].startswith("warning    the prediction is 17.7 times beyond")


def test_no_prediction_too_far_away():
    points = read_points(PUBLISHED / "olmo.csv")
    far = dataclasses.replace(points[-1], run="1T", parameters=1e12, held_out=True)
    lines = backtest([*points[:20], far], resamples=2).lines()  # the first 20 lines of the file are to be fitted
    assert lines[-2].endswith("782x  not predicted: too far from the fitted points")
    assert lines[-1].startswith("inside     0 of 0")


def test_reach():
    fitted = Range([1e6, 4e6], [1e7, 1e8])
    assert Reach.of(fitted, 2e6, 1e8) == Reach(1.0, 1.0)
    assert Reach.of(fitted, 1e5, 1e9) == Reach(10.0, 10.0)  # ten times smaller is as far as ten times larger
    assert not Reach(WARN_FACTOR, 1.0).warning()
    assert "12 times beyond the fitted points in parameters" in Reach(12.0, 2.0).warning()
    assert not Reach(LARGEST_FACTOR, 1.0).problem()
    assert "50 times is the limit" in Reach(1.0, 51.0).problem()


@pytest.mark.parametrize(("text", "problem"), [
    (None, "cannot be read: No such file"),
    ("", "its first line has no column run, parameters, tokens, loss"),
    ("run,parameters,tokens\na,1,1\n", "no column loss. Begin with the line run,parameters,tokens,loss"),
    ("run,parameters,tokens,los\n", 'column "los" is unknown or repeated. Did you mean "loss"?'),
    ("run,run,parameters,tokens,loss\n", 'column "run" is unknown or repeated'),
    ("run,parameters,tokens,loss\n", "it has no points"),
    ("# a comment\n\nrun,parameters,tokens,loss\na,1e6,2e7,4\na,1e6,2e7\n", "line 5: it has 3 values for 4 columns"),
    ("run,parameters,tokens,loss\na,1e6,2e7,-4\n", 'line 2: loss is "-4"; expected a number above 0'),
    ("run,parameters,tokens,loss\na,1e6,inf,4\n", 'line 2: tokens is "inf"'),
    ("run,parameters,tokens,loss\na,1M,2e7,4\n", 'line 2: parameters is "1M"'),
    ("run,parameters,tokens,loss,held_out\na,1e6,2e7,4,perhaps\n", 'held_out is "perhaps"; expected true or false'),
    (b"run,parameters,tokens,loss\n\xff", "cannot be read"),
])
def test_damaged_files(tmp_path, text, problem):
    path = tmp_path / "points.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = rejection(read_points, path)
    assert problem in error
    assert error.startswith("--points ")


def test_columns_in_another_order(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("# source: a paper\nloss, run, tokens, parameters, held_out\n 4.5, a, 2e7, 1e6, yes\n"
                    "3.9,b,4e7,2e6,\n")
    first, second = read_points(path)
    assert (first.run, first.parameters, first.tokens, first.loss, first.held_out) == ("a", 1e6, 2e7, 4.5, True)
    assert not second.held_out


def test_nothing_left_to_fit():
    with pytest.raises(ValueError, match="none is left to fit"):
        backtest(read_points(PUBLISHED / "pythia.csv")[-1:])


def test_constants_at_the_bounds_of_the_fit_are_named() -> None:
    """A floor of 6e-6 nats is no result: every lower one would fit the points as well."""
    assert "bound" not in law_text(Law(1.7, 400.0, 410.0, 0.34, 0.28))
    assert law_text(Law(math.exp(SMALLEST_TERM), 400.0, 410.0, 0.34, LARGEST_EXPONENT)).endswith(
        "; the fit stopped at the bound of e: the points show no loss that a run cannot fall below; the fit stopped at "
        "the bound of beta: it is at most 3 here")
