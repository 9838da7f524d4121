"""Read the expected curve of a run from --expected_curve, and check that it is a prediction for this run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from pretrain.config.plan import Plan
from pretrain.data.data_spec import names_of_split
from pretrain.data.samples.dataset import SampleDataset
from pretrain.errors import ConfigError, reason_of
from pretrain.extensions.ladder.expected_curve import FORMAT, Target, check_target, corpus_of, counted_parameters
from pretrain.extensions.ladder.extension import ExpectedCurve
from pretrain.stored_json import build, read_object

_FLAG = "--expected_curve"
_SAME = 0.01  # relative difference: 1% more parameters or tokens change a loss by less than 0.1%
_REMEDY = "write a ladder for this run with ds-pretrain ladder"


class LadderPart(TypedDict):
    """The keys of ladder.json that a run needs."""

    format: str
    corpus: dict[str, str]  # see corpus_of
    vocab_size: int
    family: str  # model_type
    scaling: str  # of the learning rate with the width: "standard" or "mup"
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
