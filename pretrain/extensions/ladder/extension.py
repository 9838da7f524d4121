"""Prediction of a run's loss from smaller models: the subcommand, and the expected curve of the run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain.cli import path_text
from pretrain.config.flags.flag import Group
from pretrain.errors import ConfigError
from pretrain.extension import Command, Extension, Problem

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.plan import Plan

GROUP = Group("evaluation and logging")


@dataclass(frozen=True)
class ExpectedCurve:
    """The file with the expected losses of a run."""

    expected_curve: str | None = GROUP.flag(
        None, "ladder.json of `ds-pretrain ladder`: the report shows its expected losses, and an event and a line in "
        "the log say when the training loss leaves them; a resume may change it", parse=path_text, metavar="FILE",
        repeats=True)


def _check(args: "RunArguments") -> None:
    if args.init_from is not None:
        raise ConfigError("--expected_curve / --init_from", found="both", expected="one of the two",
                          remedy="a ladder predicts the losses of a run that begins with random weights")
    if args.dataset_module is not None:
        raise ConfigError("--expected_curve / --dataset_module", found="both", expected="one of the two",
                          remedy="a ladder predicts the losses of a run on its own corpus, of token files")


def _callbacks(plan: "Plan") -> "Iterator[Callback]":
    from pretrain.extensions.ladder.report_curve import ReportCurve

    yield ReportCurve(plan.inputs["ladder"]["target"])


def _record(plan: "Plan") -> Mapping[str, Any]:
    from pretrain.extensions.ladder.expected_curve import target_record

    return {"expected_curve": target_record(plan.inputs["ladder"]["target"])}


EXTENSION = Extension(
    "ladder", "Predicts the loss of a run from smaller models, and says when the run leaves the prediction.",
    settings=ExpectedCurve, check=_check, inputs="expected_curve:read_expected_curve", callbacks=_callbacks,
    notes="expected_curve:expected_curve_notes", record=_record, expectation="expected_curve:expectation",
    commands={"ladder": Command("before a run", "predict the loss of a run from smaller models", ".main")},
    events={
        "off_curve": ("causes side loss expected low high consumed_tokens rows since",
                      "the loss has left the band of `--expected_curve`, for longer than its noise explains"),
        "on_curve": ("side loss expected low high consumed_tokens rows since", "it is in the band again")},
    problems={"off_curve": Problem("the loss left the expected curve: {reason}",
                                   "go through the likely causes that the event names", ("on_curve", "finished"))})
