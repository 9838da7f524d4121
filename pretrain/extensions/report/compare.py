"""Compare runs: the records of their starts (run.json) as settings, and where their losses diverge, as text or JSON."""

import hashlib
import itertools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.analysis.run_table import RunTable, kept_rows, number_or_none
from pretrain.monitor.read_run_folder import newest_start

# these sections first, in this order; the others follow in the order of the record
_SECTIONS = ("flags", "deepspeed_config", "model_config", "num_parameters", "train_steps", "layout", "batch", "data",
             "tokenizer", "versions", "git_commit", "hardware", "hosts")
_LONGEST_VALUE = 2000  # characters; longer values are replaced by their hash
_MAX_SETTINGS = 5000
_MAX_DEPTH = 12
# differ between any two starts, or repeat other values
_NOT_COMPARED = ("time", "command", "given_deepspeed_config")
_PLACES = {("flags", "save"), ("flags", "local_rank")}
_WIDTH = 80
_KEY_WIDTH = 34
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Difference:
    """A setting that differs. A value is None in a run that does not have the setting."""

    section: str
    key: str  # "" if the section is one value
    values: tuple[str | None, ...]  # by run


def settings(record: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return {(section, key): value as text}. Keys of nested objects are joined with dots."""
    found: dict[tuple[str, str], str] = {}
    others = [name for name in record if name not in _SECTIONS]
    for section in (*(name for name in _SECTIONS if name in record), *others):
        _flatten(section, "", record[section], found, depth=0)
    return found


def _flatten(section: str, key: str, value: Any, found: dict[tuple[str, str], str], *, depth: int) -> None:
    if len(found) >= _MAX_SETTINGS:
        return
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value and depth < _MAX_DEPTH:
        for name, inner in value.items():
            _flatten(section, f"{key}.{name}" if key else str(name), inner, found, depth=depth + 1)
        return
    found[section, key] = as_text(value)


def as_text(value: Any) -> str:
    """Return a string as it is, and other values as JSON. A long text becomes its size and hash."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError):
        text = "(nested too deeply)"
    if len(text) <= _LONGEST_VALUE:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return f"({len(text):,} characters, SHA-256 {digest[:16]})"


def differences(records: Sequence[dict[str, Any]]) -> list[Difference]:
    """Return the settings that are not the same in all records, without times and the names of the run folders."""
    all_settings = [settings(record) for record in records]
    keys = dict.fromkeys(key for found in all_settings for key in found)
    order = {name: number for number, name in enumerate(_SECTIONS)}
    rows = [Difference(section, key, tuple(found.get((section, key)) for found in all_settings))
            for section, key in keys if section not in _NOT_COMPARED and (section, key) not in _PLACES]
    rows = [row for row in rows if len(set(row.values)) > 1]
    return sorted(rows, key=lambda row: order.get(row.section, len(order)))


def changes_between(starts: Sequence[dict[str, Any]]) -> list[list[Difference]]:
    """Return, for each start, its differences from the start before it; none for the first."""
    return [[], *(differences(pair) for pair in itertools.pairwise(starts))][:len(starts)]


def run_names(paths: list[Path]) -> list[str]:
    """Return the names of the run folders, with as many parent folders as are needed to tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(words[-length:]) for words in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # a folder was given twice


@dataclass(frozen=True)
class LossDifference:
    """Difference between the training losses of run A and of another run, over the steps that both have logged.

    Steps and losses are None if there is no such step. A loss that is not finite is None.
    """

    run: str
    num_steps: int  # logged by both runs
    first_step: int | None  # first step with different losses
    first_losses: tuple[float | None, float | None] | None
    largest_step: int | None  # step with the largest absolute difference
    largest: float | None
    last_step: int | None  # that both have logged
    last_losses: tuple[float | None, float | None] | None


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, ...]
    names: tuple[str, ...]
    settings: list[Difference]
    losses: list[LossDifference]  # losses of all runs but the first

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Compare the newest starts of the runs, and the losses of the first run with the losses of each other run.

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
        return None if index is None else (number_or_none(ours[index]), number_or_none(theirs[index]))

    return LossDifference(name, len(steps), step(start), pair(start), step(largest),
                          None if largest is None else float(distance[largest]), step(last), pair(last))


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
