"""Hints about the curve of a run: faults that it shows, with a remedy."""

from typing import TYPE_CHECKING

from pretrain.extension import Extension

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.plan import Plan


def _callbacks(plan: "Plan") -> "list[Callback]":
    from pretrain.extensions.hints.report_hints import ReportHints

    return [ReportHints()]


EXTENSION = Extension(
    "hints", "Names faults that the curve of a run shows, with a remedy.", callbacks=_callbacks,
    hints="rules:find_hints",
    events={"hint": ("name", "the curve shows a fault of this kind for the first time; also on the terminal")})
