"""The expected losses of a run by its tokens, which a ladder of smaller models predicts: part of ladder.json."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from math import isfinite, log
from typing import TYPE_CHECKING, Any

from pretrain.model.description import ModelConfig
from pretrain.monitor.curve import Expectation, Expected
from pretrain.monitor.read_run_folder import is_number
from pretrain.stored_json import build

if TYPE_CHECKING:  # which imports numpy
    from pretrain.data.token_files.indexed_dataset import IndexedDataset

FORMAT = "ds-pretrain ladder 1"
OFF_CURVE, ON_CURVE = "off_curve", "on_curve"  # the events
LEVEL = 0.9  # probability that a loss lies in the interval of its prediction
_OUTSIDE = ("embedding", "positions", "head")  # kinds of layers that are not counted


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

    parameters: float  # see counted_parameters
    tokens: float
    tokens_per_step: float
    loss: float  # at the end
    low: float
    high: float
    curve: list[CurvePoint]  # ascending tokens, from the end of the warm-up
    peak_lr: float | None = None  # of the target's run; None: not known

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


def target_record(target: Target) -> dict[str, Any]:
    """Return the target for run.json, with one list [tokens, loss, low, high] for each point of the curve."""
    return {**asdict(target), "curve": [list(astuple(point)) for point in target.curve]}


def target_of_record(record: Mapping[str, Any]) -> Target | None:
    """Return the target of `target_record`; None if it is damaged."""
    try:
        curve = [CurvePoint(*map(float, values)) for values in record["curve"]]
        target = build(Target, {**record, "curve": [asdict(point) for point in curve]})
        check_target(target)
    except (KeyError, OverflowError, TypeError, ValueError):
        return None
    return target


def expectation(start: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Expectation | None:
    """Return what the curve in the newest record of run.json predicts; None if there is none, or if it is damaged."""
    record = start.get("expected_curve")
    target = target_of_record(record) if isinstance(record, dict) else None
    if target is None:
        return None
    changes = (event for event in reversed(events) if event.get("event") in (OFF_CURVE, ON_CURVE))
    newest: Mapping[str, Any] = next(changes, {})
    since = newest.get("since", newest.get("step"))
    is_off = newest.get("event") == OFF_CURVE and is_number(since)
    return Expectation(target.at, f"off the curve since about step {int(since)}" if is_off else "")


def check_target(target: Target) -> None:
    """Raise ValueError for numbers that no prediction has."""
    curve = target.curve
    if len(curve) < 2:
        raise ValueError("target.curve has fewer than two points")
    for name in ("tokens_per_step", "parameters"):
        if not (isfinite(getattr(target, name)) and getattr(target, name) > 0):
            raise ValueError(f"target.{name} is not a finite number above 0")
    for number, point in enumerate(curve):
        if not (isfinite(point.high) and isfinite(point.tokens) and 0 < point.low <= point.loss <= point.high):
            raise ValueError(f"target.curve[{number}]: the loss is not between low and high, which are above 0")
    if curve[0].tokens <= 0 or any(right.tokens <= left.tokens for left, right in pairwise(curve)):
        raise ValueError("the tokens of target.curve are not above 0, and ascending")


def corpus_of(sources: Iterable["IndexedDataset"]) -> dict[str, str]:
    """Return name -> fingerprint of the token files of a run: data is the same if the fingerprints are equal."""
    return {source.prefix.name: source.fingerprint for source in sources}


def counted_parameters(config: ModelConfig) -> int:
    """Return the N of a model: all its parameters without the embedding matrices and the head.

    The embeddings of small models would hide their size. With large vocabularies, laws with and without them differ
    (Pearce and Song 2024, arXiv 2406.12907). The experts that a token does not use are counted.
    """
    return sum(layer.size for layer in config.layers() if layer.kind not in _OUTSIDE)
