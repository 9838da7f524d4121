"""The expected losses of a run by its tokens, which a ladder of smaller models predicts: part of ladder.json.

A run reads them from --expected_curve, and checks that they are a prediction for this run.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pretrain.config.plan import Plan
from pretrain.data.data_spec import names_of_split
from pretrain.data.samples.dataset import SampleDataset
from pretrain.errors import ConfigError, reason_of
from pretrain.extensions.ladder.extension import ExpectedCurve
from pretrain.model.description import ModelConfig
from pretrain.monitor.curve import Expectation, Expected
from pretrain.monitor.read_run_folder import is_number
from pretrain.stored_json import build, read_object

if TYPE_CHECKING:
    from pretrain.data.token_files.indexed_dataset import IndexedDataset

FORMAT = "ds-pretrain ladder 1"
OFF_CURVE, ON_CURVE = "off_curve", "on_curve"  # the events
LEVEL = 0.9  # probability that a loss lies in the interval of its prediction
_OUTSIDE = ("embedding", "positions", "head")  # kinds of layers that are not counted
_FLAG = "--expected_curve"
_SAME = 0.01  # relative difference: 1% more parameters or tokens change a loss by less than 0.1%
_REMEDY = "write a ladder for this run with ds-pretrain ladder"


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
    peak_lr: float | None = None  # highest rate of the target's run; None: not known

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


class LadderPart(TypedDict):
    """The keys of ladder.json that a run needs."""

    format: str
    corpus: dict[str, str]  # see corpus_of
    vocab_size: int
    family: str  # model_type
    scaling: str  # scaling of the learning rate with the width: "standard" or "mup"
    target: Target


def read_expected_curve(plan: Plan) -> LadderPart:
    """Read --expected_curve, and compare it with the model, the batch and the data of a run.

    Raises ConfigError if the file is missing or damaged, or if it predicts the losses of another run.
    """
    ladder = read_ladder(Path(plan.args.of(ExpectedCurve).expected_curve or ""))
    _check_model(ladder, plan)
    tokens_per_step = plan.layout.tokens_per_step
    if not _equal(tokens_per_step, ladder["target"].tokens_per_step):
        _reject(f"{ladder['target'].tokens_per_step:,.0f} tokens in a step", f"{tokens_per_step:,}",
                f"use the batch of the ladder, or {_REMEDY}")
    _check_corpus(ladder, plan.datasets)
    return ladder


def read_ladder(path: Path) -> LadderPart:
    """Read what a run needs of ladder.json. Raises ConfigError."""
    try:
        values = read_object(path)
        if values.get("format") != FORMAT:
            raise ValueError(f'its "format" is not "{FORMAT}"')
        ladder = build(LadderPart, values)
        check_target(ladder["target"])
    except (OSError, ValueError) as error:
        raise ConfigError(_FLAG, problem=f"{path} cannot be used: {reason_of(error)}",
                          remedy="write it with ds-pretrain ladder") from None
    return ladder


def _check_model(ladder: LadderPart, plan: Plan) -> None:
    """Raise ConfigError for a ladder of another vocabulary, family or size, and for another loss."""
    model = plan.model
    if ladder["vocab_size"] != model.vocab_size:
        _reject(f"a vocabulary of {ladder['vocab_size']:,} tokens", f"{model.vocab_size:,}")
    if ladder["family"] != model.architecture:
        _reject(f"the family {ladder['family']}", model.architecture)
    parameters = counted_parameters(model)
    if not _equal(parameters, ladder["target"].parameters):
        _reject(f"{ladder['target'].parameters:,.0f} parameters (without embeddings and head)", f"{parameters:,}")
    if plan.args.label_smoothing:
        raise ConfigError(f"{_FLAG} / --label_smoothing", found="both", expected="one of the two",
                          remedy="the training loss with smoothed labels is not the cross-entropy that a ladder "
                          "predicts")


def _check_corpus(ladder: LadderPart, datasets: Mapping[str, SampleDataset]) -> None:
    """Raise ConfigError unless the data is that of the ladder. The names of the files may differ.

    The ladder's corpus is the training data, or training and validation data.
    """
    training, valid = (corpus_of(source for name in names for source in datasets[name].sources)
                       for names in (["train"], names_of_split(datasets, "valid")))
    own, theirs = {**valid, **training}, {*ladder["corpus"].values()}
    if not {*training.values()} <= theirs <= {*training.values(), *valid.values()}:
        both = (", ".join(f"{name} ({fingerprint[:8]})" for name, fingerprint in sorted(data.items()))
                for data in (ladder["corpus"], own))
        _reject(f"the data {next(both)}", next(both))


def expected_curve_notes(plan: Plan) -> list[str]:
    """Note where the run leaves the prediction: beyond its curve, with another length, rate or dropout."""
    ladder: LadderPart = plan.inputs["ladder"]
    target, notes, tokens = ladder["target"], list[str](), plan.length.samples * plan.args.seq_length
    end = target.curve[-1].tokens
    if tokens > (1 + _SAME) * end:
        notes.append(f"the curve ends at {end:,.0f} tokens, and the run has {tokens:,}: the rest is not compared")
    if plan.schedule is not None and not _equal(tokens, target.tokens):
        notes.append(f"the ladder predicts a run of {target.tokens:,.0f} tokens, and this one has {tokens:,}: its "
                     "learning rate decays at another time, which changes the loss")
    peak = peak_lr(plan)
    if target.peak_lr is not None and peak is not None and not _equal(peak, target.peak_lr):
        notes.append(f"the peak learning rate is {peak:g}, and {target.peak_lr:g} in the run that the ladder predicts")
    if (ladder["scaling"] == "mup") != (plan.args.mup_base_width is not None):
        notes.append(f"the learning rates of the ladder are scaled as {ladder['scaling']}, and those of this run are "
                     f"{'muP' if plan.args.mup_base_width is not None else 'not muP'}")
    model = plan.model
    if max(model.residual_dropout, model.attention_dropout, model.embedding_dropout) > 0:
        notes.append("with dropout, the training loss is higher than the validation loss that a ladder predicts")
    return [f"{_FLAG}: {note}" for note in notes]


def peak_lr(plan: Plan) -> float | None:
    """Return the peak learning rate of a run; None: the JSON's scheduler has it."""
    return plan.schedule.peak if plan.schedule is not None else None


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * other


def _reject(theirs: str, ours: str, remedy: str = _REMEDY) -> None:
    raise ConfigError(_FLAG, problem=f"the ladder is for {theirs}, and this run has {ours}", remedy=remedy)
