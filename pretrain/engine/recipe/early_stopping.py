"""End a run whose validation loss no longer decreases."""

import math
from typing import Any


class EarlyStopping:
    """Counts the evaluations in a row without a lower loss. All ranks must pass the same losses.

    Args:
        patience: number of such evaluations after which the run is over; 0: it never is.
        min_delta: smallest decrease that counts.
    """

    def __init__(self, *, patience: int, min_delta: float) -> None:
        self._patience, self._min_delta = patience, min_delta
        self.best: float | None = None  # lowest loss
        self.best_step = 0
        self.evaluations = 0  # since then

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
