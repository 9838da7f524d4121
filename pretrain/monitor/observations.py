"""Observations about a run's learning, from the values of its logged steps: one line each, once.

Each rule compares the loss with a value that is known before: ln(V), the loss of equal probabilities, or the unigram
entropy of the data. The limits stay far from the values of healthy runs (tests/distributed/test_observations.py).
"""

import math
from collections.abc import Mapping
from typing import Any

from pretrain.config.plan import Plan
from pretrain.engine.optimizer import peak_learning_rate

_RISE = 0.1  # nats above the first loss; losses of two batches of one model differ by 0.02 to 0.05
_FIRST_STEPS = 10  # a high rate may raise the loss in the first steps of a healthy run, too
_SMALLEST_UPDATE = 1e-5  # relative; healthy runs have 1e-4 to 1e-2, and bf16 rounds changes below 2e-3
_LOWEST_LOSS = 0.05  # nats; the best models of text and code have 0.3 for each byte
_LEARNING_STEPS = 1000  # after fewer, a slow warm-up may be the reason


class Observations:
    """The rules, and what they need to know from earlier rows."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._peak_lr = plan, peak_learning_rate(plan)
        self._log_v = math.log(plan.model.vocab_size)
        self._first: Mapping[str, Any] | None = None  # row of this process
        self._skipped_steps = 0  # at the last row
        self._rules = [self._diverged, self._nothing_moves, self._nothing_to_learn, self._only_frequencies]

    def observe(self, row: Mapping[str, Any]) -> list[str]:
        """Return a line for each rule that the row of a logged step is the first to fulfill."""
        self._first = self._first or row
        found = {rule: line for rule in self._rules if (line := rule(row))}
        self._rules = [rule for rule in self._rules if rule not in found]
        self._skipped_steps = row["skipped_steps"]
        return list(found.values())

    def _diverged(self, row: Mapping[str, Any]) -> str:
        first, loss = self._first or row, row["loss"]
        if row["step"] - first["step"] < _FIRST_STEPS - 1 or not loss > max(self._log_v, first["loss"] + _RISE):
            return ""
        return (f"the loss has risen from {first['loss']:.2f} to {loss:.2f}, above the loss of equal probabilities, "
                f"ln({self._plan.model.vocab_size}) = {self._log_v:.2f}: the learning rate (peak {self._peak_lr:g}) is "
                "too high, or the run is unstable; `ds-pretrain find-lr` suggests a rate")

    def _nothing_moves(self, row: Mapping[str, Any]) -> str:
        ratio, lr = row["update_ratio"], row["lr"]
        is_skipped = row["skipped_steps"] > self._skipped_steps  # the update of this step may be one of them
        if row["step"] < 2 or is_skipped or not lr > 0.1 * self._peak_lr or \
                not ratio * self._peak_lr / lr < _SMALLEST_UPDATE:  # NaN: not measured
            return ""
        return (f"an update changes the weights by {ratio:.0e} of their norm, and those of healthy runs by 1e-4 to 1e-2"
                f": the learning rate (peak {self._peak_lr:g}) is too low; `ds-pretrain find-lr` suggests a rate")

    def _nothing_to_learn(self, row: Mapping[str, Any]) -> str:
        if not row["loss"] < _LOWEST_LOSS:
            return ""
        epochs = row["consumed_samples"] / self._plan.datasets["train"].samples_per_epoch
        return (f"the loss is {row['loss']:.2g}, and no text is so predictable: the data is constant or repeats "
                f"itself, or the model has memorized it (it has been read {epochs:.1f} times)")

    def _only_frequencies(self, row: Mapping[str, Any]) -> str:
        entropy = self._plan.unigram_entropy
        if row["step"] < _LEARNING_STEPS or entropy is None or self._plan.args.label_smoothing or \
                not row["loss"] > entropy:
            return ""
        return (f"after {row['step']} steps, the loss is {row['loss']:.2f}, not below the unigram entropy of the data, "
                f"{entropy:.2f}: the model has learned at most how frequent each token is; `ds-pretrain sanity` tests "
                "data, model and learning rate")
