"""Compare runs: their settings, and where their losses diverge, as text or JSON."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.analysis.report.configuration import Difference, differences
from pretrain.analysis.report.page_data import run_names
from pretrain.analysis.report.reduce import kept_rows
from pretrain.analysis.report.run_table import RunTable
from pretrain.monitor.read_run_folder import newest_start

_WIDTH = 80
_KEY_WIDTH = 34
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class LossDifference:
    """Difference between the training losses of run A and of another run, over the steps that both have logged.

    Steps and losses are None if there is no such step. A loss that is not finite is None.
    """

    run: str
    num_steps: int  # logged by both runs
    first_step: int | None  # with different losses
    first_losses: tuple[float | None, float | None] | None
    largest_step: int | None  # with the largest absolute difference
    largest: float | None
    last_step: int | None  # that both have logged
    last_losses: tuple[float | None, float | None] | None


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, ...]
    names: tuple[str, ...]
    settings: list[Difference]
    losses: list[LossDifference]  # of all runs but the first

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Compare the newest starts of the runs, and the losses of the first run with those of each other run.

    Raises ConfigError if a run.json is missing or damaged.
    """
    records = [newest_start(path) for path in paths]
    losses = [_losses(RunTable(path)) for path in paths]
    names = run_names(list(paths))
    return Comparison(tuple(map(str, paths)), tuple(names), differences(records),
                      [_loss_difference(name, losses[0], other)
                       for name, other in zip(names[1:], losses[1:], strict=True)])


def _losses(table: RunTable) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and losses without the steps that were trained again later."""
    kept = kept_rows(table.training)
    return table.training.column("step")[kept], table.training.column("loss")[kept]


def _loss_difference(name: str, first: tuple[np.ndarray, np.ndarray],
                     second: tuple[np.ndarray, np.ndarray]) -> LossDifference:
    steps, in_first, in_second = np.intersect1d(first[0], second[0], return_indices=True)
    ours, theirs = first[1][in_first], second[1][in_second]
    is_different = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
    distance = np.abs(ours - theirs)
    start = int(np.argmax(is_different)) if is_different.any() else None
    largest = int(np.nanargmax(distance)) if np.any(np.isfinite(distance)) else None
    last = len(steps) - 1 if len(steps) else None

    def step(index: int | None) -> int | None:
        return None if index is None else int(steps[index])

    def pair(index: int | None) -> tuple[float | None, float | None] | None:
        return None if index is None else (_finite(ours[index]), _finite(theirs[index]))

    return LossDifference(name, len(steps), step(start), pair(start), step(largest),
                          None if largest is None else float(distance[largest]), step(last), pair(last))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the comparison as text of at most 80 columns. The runs are named A, B, C ..."""
    letters = [_letter(number) for number in range(len(comparison.runs))]
    lines = ["runs", *(line for letter, run in zip(letters, comparison.runs, strict=True)
                       for line in _wrapped(f"  {letter}  ", run))]
    section = ""
    for row in comparison.settings:
        if row.section != section:
            section = row.section
            lines += ["", section if row.key else f"{section} (one value)"]
        lines += _difference_lines(row, letters)
    if not comparison.settings:
        lines += ["", "settings", "  The records of the newest starts are the same."]
    lines += ["", "training loss, at the steps that both runs have logged"]
    for letter, losses in zip(letters[1:], comparison.losses, strict=True):
        for text in _loss_texts(letter, losses):
            lines += _wrapped("  ", text)
    return lines


def _letter(number: int) -> str:
    return _LETTERS[number] if number < len(_LETTERS) else f"R{number + 1}"


def _difference_lines(row: Difference, letters: Sequence[str]) -> list[str]:
    """Return one line if all values fit next to the key, else one line per value. Runs with the same value share it."""
    groups: dict[str, list[str]] = {}
    for letter, value in zip(letters, row.values, strict=True):
        groups.setdefault("(not set)" if value is None else value, []).append(letter)
    values = [(",".join(names), " ".join(value.split())) for value, names in groups.items()]
    line = f"  {row.key or 'value':<{_KEY_WIDTH - 3}} " + "  ".join(f"{names} {value}" for names, value in values)
    if len(line) <= _WIDTH:
        return [line]
    return [*_wrapped("  ", row.key or "value"), *(part for names, value in values
                                                   for part in _wrapped(f"    {names}  ", value))]


def _wrapped(indent: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent),
                         break_on_hyphens=False) or [indent.rstrip()]


def _loss_texts(letter: str, losses: LossDifference) -> list[str]:
    if losses.last_losses is None:
        return [f"A and {letter} have no logged step in common"]
    if losses.first_losses is None:
        return [f"A and {letter} are equal at all {losses.num_steps:,} steps (the last is {losses.last_step})"]
    texts = [f"A and {letter} first differ at step {losses.first_step}: {_both(letter, losses.first_losses)}"]
    if losses.largest is not None:
        texts.append(f"largest difference {losses.largest:.6g}, at step {losses.largest_step}")
    last = f"last of {losses.num_steps:,} common steps, {losses.last_step}"
    return [*texts, f"{last}: {_both(letter, losses.last_losses)}"]


def _both(letter: str, losses: tuple[float | None, float | None]) -> str:
    first, second = losses
    text = f"A {_text(first)}, {letter} {_text(second)}"
    if first is None or second is None:
        return text
    relative = f", {abs(second - first) / abs(first):.2g} relative" if first else ""
    return f"{text} (difference {second - first:+.6g}{relative})"


def _text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6f}"
