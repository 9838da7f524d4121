"""Runs of a recipe by their names, and the form of a result."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pretrain.commands.small_runs import Curve

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Result:
    """Whether an expectation is met, in a line of text."""

    is_met: bool
    text: str


def sweep_of(name: str) -> str:
    """Return the sweep that a run belongs to: its name without the number at the end, such as w64 of w64-0.001."""
    sweep, _, number = name.rpartition("-")
    return sweep if sweep and _NUMBER.fullmatch(number) else name


def runs_of(sweep: str, curves: Mapping[str, Curve]) -> dict[float, Curve]:
    """Return the runs SWEEP-NUMBER of a sweep by their numbers, in ascending order."""
    names = [name for name in curves if sweep_of(name) == sweep != name]
    return dict(sorted((float(name.rpartition("-")[2]), curves[name]) for name in names))
