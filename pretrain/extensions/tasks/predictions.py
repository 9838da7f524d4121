"""The model's continuations of fixed validation samples: RUN/predictions.jsonl, and their section of the run's page."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.analysis.run_table import as_float
from pretrain.callback import Callback, Run
from pretrain.errors import escape_controls, shorten
from pretrain.extensions.tasks.extension import PREDICTIONS_FILE
from pretrain.monitor.read_run_folder import Tail

_MAX_PROMPT, _MAX_NEW = 64, 48  # tokens
_MAX_SEQUENCES, _MAX_EVALUATIONS = 20, 50  # on the page
_LONGEST = 2000  # characters of a text


class Predictions(Callback):
    """Continues the beginnings of the first --show_predictions samples of the (first) validation set.

    A sample of T tokens has a prompt of min(64, T / 2) tokens, and the model adds min(48, T / 2).
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def start(self, run: Run) -> None:
        import torch

        from pretrain.data.data_spec import names_of_split
        from pretrain.data.samples.dataset import PADDING

        plan, self._tokenizer = run.plan, run.plan.tokenizer
        self._prompt = min(_MAX_PROMPT, max(plan.args.seq_length // 2, 1))
        new = min(_MAX_NEW, max(plan.args.seq_length // 2, 1))
        dataset = plan.datasets[names_of_split(plan.datasets, "valid")[0]]
        samples = dataset.samples(np.arange(self._num_samples))[:, :self._prompt + new].astype(np.int64)
        self._samples_NT = torch.from_numpy(np.where(samples == PADDING, plan.eod_token or 0, samples))

    def after_evaluation(self, run: Run, loss: float | None) -> None:
        """Write a row for each sample, on rank 0. Collective."""
        if loss is None:
            return
        with run.phase("eval"):
            self._write(run)

    def _write(self, run: Run) -> None:
        from pretrain.engine.token_scores import continue_greedily

        prompts_NT, actual_NT = self._samples_NT.split((self._prompt, self._samples_NT.shape[1] - self._prompt), 1)
        document_end = run.plan.eod_token if run.plan.args.document_attention else None
        predicted_NT = continue_greedily(run.engine, prompts_NT, actual_NT.shape[1], document_end=document_end,
                                         before=lambda: run.watchdog.enter("eval", run.step))
        rows = zip(prompts_NT.tolist(), predicted_NT.tolist(), actual_NT.tolist(), strict=True)
        for number, (prompt, predicted, actual) in enumerate(rows):
            run.folder.append(PREDICTIONS_FILE, {
                "step": run.step, "time": time.time(), "consumed_samples": run.consumed_samples, "sequence": number,
                "prompt": self._text(prompt), "predicted": self._text(predicted), "actual": self._text(actual),
                "prompt_tokens": prompt, "predicted_tokens": predicted, "actual_tokens": actual})

    def _text(self, tokens: list[int]) -> str | None:
        """Return the text of the tokens, without those that only the model's vocabulary has."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return tokenizer.decode([token for token in tokens if 0 <= token < tokenizer.vocab_size])


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
