"""Early stopping: a run ends when its validation loss no longer decreases."""

import math
from typing import Any

from pretrain.callback import Callback, Run
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.monitor.announce import EARLY_STOP


class EarlyStopping(Callback):
    """Ends a run whose validation loss no longer decreases: it counts the evaluations in a row without a lower loss.

    Args:
        patience: number of such evaluations after which the run is over; 0: it never is.
        min_delta: smallest decrease that counts.
    """

    name, of_run, order = "early_stopping", True, 90  # after the lines about the evaluation

    def __init__(self, *, patience: int, min_delta: float) -> None:
        self._patience, self._min_delta = patience, min_delta
        self.best: float | None = None  # lowest loss
        self.best_step = 0
        self.evaluations = 0  # since then

    @classmethod
    def of_flags(cls, args: RunArguments) -> "EarlyStopping":
        return cls(patience=args.early_stopping_patience, min_delta=args.early_stopping_min_delta)

    def after_evaluation(self, run: Run, loss: float | None) -> None:
        """Count the evaluation, and stop the run, with a save, if it is over before its last step."""
        if loss is None:
            return
        self.observe(run.step, loss)
        if self.is_over and run.step != run.plan.train_steps:
            run.event(EARLY_STOP, reason=self.reason(), best=self.best, best_step=self.best_step)
            run.screen.line(early_end_line(run.plan, run.step, self.reason()))
            run.stop(EARLY_STOP, is_done=True)

    def observe(self, step: int, loss: float) -> None:
        """Add the result of an evaluation. A loss that is NaN or infinite is not lower."""
        if math.isfinite(loss) and (
                self.best is None or (loss < self.best and self.best - loss >= self._min_delta)):
            self.best, self.best_step, self.evaluations = loss, step, 0
        else:
            self.evaluations += 1

    @property
    def is_over(self) -> bool:
        return 0 < self._patience <= self.evaluations

    def reason(self) -> str:
        """Say why the run is over."""
        delta = f" by at least {self._min_delta:g}" if self._min_delta else ""
        best = f"{self.best:.4f} at step {self.best_step}" if self.best is not None else "not finite"
        return f"the validation loss has not decreased{delta} in {self.evaluations} evaluations; the lowest was {best}"

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if the run has no early stopping."""
        if not self._patience:
            return None
        return {"best": self.best, "best_step": self.best_step, "evaluations": self.evaluations}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Continue from the state of a checkpoint; None: from the start."""
        state = state or {}
        self.best, self.best_step = state.get("best"), state.get("best_step", 0)
        self.evaluations = state.get("evaluations", 0)


def early_end_line(plan: Plan, step: int, reason: str) -> str:
    """Say that early stopping has ended the run, and how to continue it."""
    return (f"{plan.args.save} ended early at step {step} of {plan.train_steps}: {reason}; to continue, give "
            f"--early_stopping_patience above {plan.args.early_stopping_patience}, or 0 for no early stopping")
