"""The tensors that enter the model at a step of a run, read by the run's own loader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.data.loader import MicroBatch
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import newest_path, read_metrics, read_rows, read_starts

_END = "\u2016"  # marks the end of a document in a text


@dataclass(frozen=True)
class StepPosition:
    """The start of the run that trained a step, and the data position at the beginning of the step."""

    start: dict[str, Any]  # of run.json
    step: int
    consumed_samples: int


def find_step(run: Path, step: int) -> StepPosition:
    """Find the data position of a step, from 1. Raises ConfigError if the run has not trained this step.

    If a step was trained several times, because of a resume or a rollback, the last time counts.
    """
    starts = _starts_with_steps(run)
    trained = [start for first, start in starts if first < step]
    rows = [row for row in newest_path([row for row in read_metrics(run) if "loss" in row])
            if isinstance(row.get("consumed_samples"), int)]
    last = rows[-1]["step"] if rows else 0
    if not 1 <= step <= last:
        raise ConfigError(f"--step {step}", problem=f"{run} has logged the steps 1 to {last}" if last else
                          f"{run} has logged no step", remedy="give a step that the run has trained")
    start = trained[-1]
    try:
        batch = int(start["batch"]["global_batch_size"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{run}: run.json", problem="the record of the run's batch size is damaged") from None
    # the next logged step: the steps between two logged steps follow one another
    following = next(row for row in rows if row["step"] >= step)
    return StepPosition(start, step, following["consumed_samples"] - (following["step"] - step + 1) * batch)


def _starts_with_steps(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the starts of the run that trained, each with the number of steps that were done before."""
    steps = [row["step"] for row in read_rows(run / "events.jsonl") if row.get("event") in ("start", "resume")]
    return list(zip(steps, read_starts(run), strict=False))


def check_labels(batches: Sequence[MicroBatch]) -> list[str]:
    """Return a line for each sequence whose labels are not its tokens shifted by one, where labels count."""
    lines = []
    for number, (inputs, (labels_BT, weights_BT)) in enumerate(batches):
        tokens_BT = inputs[0] if isinstance(inputs, tuple) else inputs
        counted = weights_BT[:, :-1] > 0
        wrong = (tokens_BT[:, 1:] != labels_BT[:, :-1]) & counted
        for row in torch.unique(torch.nonzero(wrong)[:, 0]).tolist():
            position = int(torch.nonzero(wrong[row])[0])
            lines.append(f"micro-batch {number}, sequence {row}: the label at position {position} is "
                         f"{int(labels_BT[row, position])}, and the next token {int(tokens_BT[row, position + 1])}")
    return lines


def sequence_lines(batch: MicroBatch, row: int, *, tokens: int, eod_token: int | None,
                   decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    """Return a table of the first `tokens` positions of a sequence, and its text with marks between documents."""
    inputs, (labels_BT, weights_BT) = batch
    tokens_BT = inputs[0] if isinstance(inputs, tuple) else inputs
    positions = inputs[1][row].tolist() if isinstance(inputs, tuple) else list(range(tokens_BT.shape[1]))
    values, labels, weights = tokens_BT[row].tolist(), labels_BT[row].tolist(), weights_BT[row].tolist()
    lines = [f"{'position':>10} {'token':>8} {'label':>8}  counts  text"]
    for place in range(min(tokens, len(values))):
        text = repr(decode([values[place]])) if decode else ""
        mark = f"  {_END} end of document" if values[place] == eod_token else ""
        lines.append(f"{positions[place]:>10} {values[place]:>8} {labels[place]:>8}  "
                     f"{'yes' if weights[place] > 0 else 'no':>6}  {text}{mark}")
    if decode:
        lines.append("text: " + f" {_END} ".join(decode(part) for part in _documents(values, eod_token)))
    return lines


def _documents(tokens: list[int], eod_token: int | None) -> list[list[int]]:
    """Divide tokens after each end-of-document token."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == eod_token:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
