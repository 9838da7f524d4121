"""A Run for tests of single callbacks: what a test does not give does nothing."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from pretrain.callback import Run
from pretrain.distributed.world import ALONE, World


def run_of(plan: Any, engine: Any = None, *, world: World = ALONE, folder: Any = None, screen: Any = None,
           reject: Callable[[str], None] = lambda line: None, step: int = 0, consumed_samples: int = 0) -> Run:
    """Return a run that is about to train the step after `step`."""
    return Run(plan, world, engine, folder or MagicMock(), screen or MagicMock(), watchdog=MagicMock(),
               meter=MagicMock(), reject=reject, step=step, consumed_samples=consumed_samples)
