"""The model's continuations of validation samples, by sample and evaluation, for the page of a run."""

from pathlib import Path
from typing import Any

import numpy as np

from pretrain.analysis.run_table import as_float
from pretrain.errors import escape_controls, shorten
from pretrain.extensions.tasks.extension import PREDICTIONS_FILE
from pretrain.monitor.read_run_folder import Tail

_MAX_SEQUENCES, _MAX_EVALUATIONS = 20, 50  # on the page
_LONGEST = 2000  # characters of a text


class Texts:
    """The texts of RUN/predictions.jsonl, read as it grows."""

    def __init__(self, run: Path) -> None:
        self._tail, self._rows = Tail(run / PREDICTIONS_FILE), list[dict[str, Any]]()

    def update(self) -> None:
        if self._tail.was_replaced():
            self._tail, self._rows = Tail(self._tail.path), []
        for block in self._tail.blocks():
            self._rows += [row for _, row in block]

    def state(self) -> str:
        return str(len(self._rows))

    def data(self) -> list[dict[str, Any]]:
        return predictions_data(self._rows)


def predictions_data(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each sample with its prompt, its actual text and [step, predicted text], the newest first.

    Without a tokenizer a text is a list of tokens. Evaluations that a resume or a rollback repeated count once. Of very
    many evaluations, evenly spaced ones are returned.
    """
    of_sequence: dict[int, list[dict[str, Any]]] = {}
    for row in reversed(rows):
        number, step = as_float(row.get("sequence")), as_float(row.get("step"))
        if not (number >= 0 and step >= 0):  # false for NaN
            continue
        kept = of_sequence.setdefault(int(number), [])
        if not kept or step < kept[-1]["step"]:
            kept.append(row)
    return [_data(kept) for _, kept in sorted(of_sequence.items())[:_MAX_SEQUENCES]]


def _data(kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of a sample from its rows, the newest first."""
    indices = np.unique(np.linspace(0, len(kept) - 1, min(len(kept), _MAX_EVALUATIONS)).astype(int))
    return {"prompt": _text(kept[0], "prompt"), "actual": _text(kept[0], "actual"),
            "predicted": [[kept[index]["step"], _text(kept[index], "predicted")] for index in indices]}


def _text(row: dict[str, Any], name: str) -> str:
    text = row.get(name)
    if not isinstance(text, str):
        tokens = row.get(f"{name}_tokens")
        text = " ".join(map(str, tokens)) if isinstance(tokens, list) else ""
    return escape_controls(shorten(text, _LONGEST))
