"""What a rank does during a replay: the functions that the step loop calls around each step."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.analysis.replay.order import SAMPLES, SAMPLES_FILE, STEPS_AFTER, ReplayOrder, read_order
from pretrain.analysis.replay.samples import examine_samples
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.config.plan import Plan


@dataclass
class Replay:
    """A replay on this rank."""

    order: ReplayOrder

    def before_step(self, number: int, engine: DeepSpeedEngine) -> None:
        """Call this before each step. `number`: of the step since this process started, from 1."""

    def examine(self, engine: DeepSpeedEngine, plan: Plan, step: int, consumed_samples: int,
                before: Callable[[], None]) -> None:
        """Before the step in question, examine its samples if the order asks for it: samples.json in the run folder."""
        if SAMPLES not in self.order.more or step != self.order.step:
            return
        report = examine_samples(engine, plan, step=step, consumed_samples=consumed_samples, before=before,
                                 steps_after=int(self.order.more[SAMPLES].get("steps_after", STEPS_AFTER)))
        if dist.get_rank() == 0:
            write_atomically(Path(plan.args.save) / SAMPLES_FILE, json.dumps(report.to_json(), indent=1))

    def after_step(self, number: int, report: Callable[[str], None]) -> None:
        """Call this after each step. `report` prints a line on rank 0."""


def begin_replay(path: Path) -> Replay:
    """Return the replay of an order. Raises ConfigError."""
    return Replay(read_order(path))
