"""The model's continuations of fixed validation samples, which each evaluation writes to RUN/predictions.jsonl."""

import time

import numpy as np
import torch

from pretrain.callback import Callback, Run
from pretrain.data.data_spec import names_of_split
from pretrain.data.samples.dataset import PADDING
from pretrain.engine.token_scores import continue_greedily
from pretrain.extensions.tasks.extension import PREDICTIONS_FILE

_MAX_PROMPT, _MAX_NEW = 64, 48  # tokens


class Predictions(Callback):
    """Continues the beginnings of the first --show_predictions samples of the (first) validation set.

    A sample of T tokens has a prompt of min(64, T / 2) tokens, and the model adds min(48, T / 2).
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def start(self, run: Run) -> None:
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
