"""The file ladder.json: the trained points, the laws that fit them, and the expected losses of the target's run."""

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite, log
from pathlib import Path

from pretrain.analysis.scaling.law import Expected, Law
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError
from pretrain.stored_json import build, read_object, reason_of

FORMAT = "ds-pretrain ladder 1"
DECAYED, STABLE = "decayed", "stable"  # keys of `laws`


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
class CurvePoint:
    """The expected loss of the target's run after a number of tokens, under its own schedule."""

    tokens: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Target:
    """The model that the ladder is for, and its expected losses in nats a token."""

    parameters: float
    tokens: float
    tokens_per_step: float
    loss: float  # at the end
    low: float
    high: float
    curve: list[CurvePoint]  # ascending tokens, from the end of the warm-up

    def at(self, tokens: float) -> Expected | None:
        """Return the expected loss after `tokens`, interpolated linearly in log(tokens); None outside of the curve."""
        after = bisect_right(self.curve, tokens, key=lambda point: point.tokens)
        if tokens == self.curve[-1].tokens:
            after -= 1
        if not 0 < after < len(self.curve):
            return None
        left, right = self.curve[after - 1], self.curve[after]
        part = log(tokens / left.tokens) / log(right.tokens / left.tokens)
        return Expected(left.loss + part * (right.loss - left.loss), left.low + part * (right.low - left.low),
                        left.high + part * (right.high - left.high))


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


def corpus_of(sources: Iterable[IndexedDataset]) -> dict[str, str]:
    """Return name -> fingerprint of the token files of a run: data is the same if the fingerprints are equal."""
    return {source.prefix.name: source.fingerprint for source in sources}


def write_ladder(path: Path, ladder: Ladder) -> None:
    """Write ladder.json atomically. Raises OSError."""
    write_atomically(path, json.dumps(asdict(ladder), indent=1, allow_nan=False) + "\n")


def read_ladder(path: Path, where: str = "") -> Ladder:
    """Read and check ladder.json. Raises ConfigError, which names `where` (by default, the path)."""
    try:
        values = read_object(path)
        if values.get("format") != FORMAT:
            raise ValueError(f'its "format" is not "{FORMAT}"')
        ladder = build(Ladder, values)
        _check_target(ladder.target)
    except (OSError, ValueError) as error:
        raise ConfigError(where or str(path), problem=f"{path} cannot be used: {reason_of(error)}" if where
                          else reason_of(error), remedy="write it with ds-pretrain ladder") from None
    return ladder


def _check_target(target: Target) -> None:
    """Raise ValueError for numbers that no prediction has."""
    curve = target.curve
    if len(curve) < 2:
        raise ValueError("target.curve has fewer than two points")
    if not (isfinite(target.tokens_per_step) and target.tokens_per_step > 0):
        raise ValueError("target.tokens_per_step is not a finite number above 0")
    for number, point in enumerate(curve):
        if not (isfinite(point.high) and isfinite(point.tokens) and 0 < point.low <= point.loss <= point.high):
            raise ValueError(f"target.curve[{number}]: the loss is not between low and high, which are above 0")
    if curve[0].tokens <= 0 or any(right.tokens <= left.tokens for left, right in pairwise(curve)):
        raise ValueError("the tokens of target.curve are not above 0, and ascending")
