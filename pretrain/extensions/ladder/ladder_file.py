"""The file ladder.json: the trained points, the laws that fit them, and the expected losses of the target's run.

Also how far a prediction lies beyond the points of the law, and the limits of what is predicted. The limits are from
backtests on four published families (README.md, Backtests). Up to 10 times beyond the fitted points, the errors were at
most 4%, and 92% of the losses lay in the 90% intervals; further, errors of 6.5% were seen. Nothing was tested beyond 58
times.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.errors import format_number
from pretrain.extensions.ladder.expected_curve import FORMAT, Target
from pretrain.extensions.ladder.law import Law

DECAYED, STABLE = "decayed", "stable"  # keys of `laws`
WARN_FACTOR = 10.0
LARGEST_FACTOR = 50.0


@dataclass(frozen=True)
class Point:
    """The validation loss of a model after a number of tokens."""

    run: str
    parameters: float  # see counted_parameters
    tokens: float  # that the model was trained with
    loss: float  # nats a token
    decayed: bool = True  # at the end of the learning rate's decay; False: in the stable phase of WSD
    held_out: bool = False  # the fit does not use it


@dataclass(frozen=True)
class Range:
    """Smallest and largest values of the fitted points."""

    parameters: list[float]
    tokens: list[float]

    @staticmethod
    def of(points: Iterable[Point]) -> "Range":
        fitted = [point for point in points if not point.held_out]
        parameters, tokens = [point.parameters for point in fitted], [point.tokens for point in fitted]
        return Range([min(parameters), max(parameters)], [min(tokens), max(tokens)])


@dataclass(frozen=True)
class Ladder:
    """The content of ladder.json."""

    corpus: dict[str, str]  # see corpus_of
    vocab_size: int
    family: str  # model_type
    scaling: str  # of the learning rate with the width: "standard" or "mup"
    points: list[Point]
    laws: dict[str, Law]
    range: Range
    target: Target
    format: str = FORMAT


def write_ladder(path: Path, ladder: Ladder) -> None:
    """Write ladder.json atomically. Raises OSError."""
    write_atomically(path, json.dumps(asdict(ladder), indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Reach:
    """Factors by which a model and its tokens lie outside of the range of the points; 1 within it."""

    parameters: float
    tokens: float

    @staticmethod
    def of(fitted: Range, parameters: float, tokens: float) -> "Reach":
        return Reach(_factor(fitted.parameters, parameters), _factor(fitted.tokens, tokens))

    @property
    def factor(self) -> float:
        return max(self.parameters, self.tokens)

    def problem(self) -> str:
        """Return why the prediction is rejected; "" if it is not."""
        return f"{self}: {LARGEST_FACTOR:g} times is the limit" if self.factor > LARGEST_FACTOR else ""

    def warning(self) -> str:
        """Return a warning about the prediction; "" up to WARN_FACTOR."""
        if self.factor <= WARN_FACTOR:
            return ""
        return f"{self}: further than {WARN_FACTOR:g} times, backtests had errors of up to 6.5%"

    def __str__(self) -> str:
        return (f"the prediction is {format_number(self.parameters)} times beyond the fitted points in parameters, and "
                f"{format_number(self.tokens)} times in tokens")


def _factor(limits: list[float], value: float) -> float:
    low, high = limits
    return max(1.0, value / high, low / value)
