"""Sanity checks of a run before step 1, and a search for the learning rate: declaration, and the results of checks."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pretrain.config.flags.flag import Group
from pretrain.extension import Command, Extension
from pretrain.terminal import Screen, aligned

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.plan import Plan

GROUP = Group("checks, measurements and profiles")
BEFORE_A_RUN = "before a run"


@dataclass(frozen=True)
class Result:
    """Result of one check: the measured value next to its bound."""

    check: str  # short name, such as "causal mask"
    passed: bool | None  # None: the check was not run, and `measured` says why
    measured: str
    bound: str
    remedy: str  # what to do if the check failed
    value: float | None = None  # the measured number, if it is a single one


def not_made(check: str, reason: str) -> Result:
    """Return the result of a check that could not be made."""
    return Result(check, None, reason, "", "")


def failed_checks(results: list[Result]) -> list[str]:
    """Return the names of the failed checks."""
    return [result.check for result in results if result.passed is False]


def table_lines(results: list[Result]) -> list[str]:
    """Return the table of the results, and below it what to do about each failed check."""
    words = {True: "pass", False: "FAIL", None: "-"}
    rows = [("check", "result", "measured", "expected")]
    rows += [(result.check, words[result.passed], result.measured, result.bound) for result in results]
    lines = aligned(rows, num_words=4)
    lines += [f"{result.check}: {result.remedy}" for result in results if result.passed is False]
    failed, made = len(failed_checks(results)), sum(result.passed is not None for result in results)
    return [*lines, f"{failed} of {made} checks failed" if failed else f"all {made} checks passed"]


def print_table(results: list[Result], *, active: bool = True) -> None:
    """Print the table if `active`. A terminal shows its lines wrapped between words."""
    screen = Screen(active=active)
    for line in table_lines(results):
        screen.line(line)


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    """Return the results as a list of JSON objects."""
    return [asdict(result) for result in results]


@dataclass(frozen=True)
class Sanity:
    """Checks before step 1."""

    sanity_check: bool = GROUP.flag(
        False, "before step 1: run the checks of `ds-pretrain sanity`, and reject the run if one fails; a run that "
        "resumes is not checked again", repeats=True)


def _callbacks(plan: "Plan") -> "Iterator[Callback]":
    if plan.args.of(Sanity).sanity_check:
        from pretrain.extensions.sanity.run_checks import SanityCheck
        yield SanityCheck()


EXTENSION = Extension(
    "sanity", "Tests data, gradients and learning on the run's engine before step 1, and suggests a learning rate.",
    settings=Sanity, callbacks=_callbacks,
    commands={"sanity": Command(BEFORE_A_RUN, "test data, gradients and learning on the run's engine", ".main",
                                "sanity_main", runs_on_ranks=True),
              "find-lr": Command(BEFORE_A_RUN, "suggest a learning rate", ".main", "find_lr_main", runs_on_ranks=True)},
    events={"sanity": ("seconds checks", "results of `--sanity_check`")},
    advice={"no_gradient": "`ds-pretrain sanity` with the same flags looks for the cause",
            "no_update": "`ds-pretrain sanity` tests them", "no_learning": "`ds-pretrain sanity` tests them",
            "off_curve": "`ds-pretrain sanity` tests data, labels, masks, gradients and the size of an update, in this "
                         "order",
            **dict.fromkeys(("rate_too_high", "rate_too_low", "divergence"), "`ds-pretrain find-lr` suggests a rate"),
            **dict.fromkeys(("exploding_gradients", "vanishing_gradients"),
                            "`ds-pretrain sanity` shows the gradient of each layer")})
