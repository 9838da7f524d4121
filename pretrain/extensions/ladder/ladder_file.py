"""The file ladder.json: the trained points, the laws that fit them, and the expected losses of the target's run."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.extensions.ladder.expected_curve import FORMAT, Target
from pretrain.extensions.ladder.law import Law

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
