"""The guard against bad steps: it counts skipped updates, finds spikes, and decides when the run is rolled back."""

from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal.screen import Screen


@dataclass(frozen=True)
class Verdict:
    """Decision of the guard after a step; the same on all ranks."""

    rollback: str = ""  # why the run has to return to an earlier checkpoint; "": it continues


class Guard:
    """Observes loss, gradient norm and skipped updates of each step. Its decisions are the same on all ranks."""

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, folder: RunFolder, screen: Screen) -> None:
        self._plan, self._engine, self._folder, self._screen = plan, engine, folder, screen

    def observe(self, step: int, loss: torch.Tensor, consumed_samples: int) -> Verdict:
        """Record a finished step. `loss`: scalar on the device; `consumed_samples`: including those of this step.

        Raises GuardError if the run cannot continue.
        """
        return Verdict()
