"""Sanity checks of a run before step 1, and a search for the learning rate: the flag and the subcommands."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.config.flags.flag import Group
from pretrain.extension import Command, Extension

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.plan import Plan

GROUP = Group("checks, measurements and profiles")
BEFORE_A_RUN = "before a run"


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
