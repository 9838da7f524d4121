"""What a rank does during a replay: the functions that the step loop calls around each step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepspeed import DeepSpeedEngine

from pretrain.analysis.replay.order import ReplayOrder, read_order


@dataclass
class Replay:
    """A replay on this rank."""

    order: ReplayOrder

    def before_step(self, number: int, engine: DeepSpeedEngine) -> None:
        """Call this before each step. `number`: of the step since this process started, from 1."""

    def after_step(self, number: int, report: Callable[[str], None]) -> None:
        """Call this after each step. `report` prints a line on rank 0."""


def begin_replay(path: Path) -> Replay:
    """Return the replay of an order. Raises ConfigError."""
    return Replay(read_order(path))
