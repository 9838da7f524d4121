"""One rank of a test: train each case of a JSON file as `pretrain/train.py` does, with a planted fault.

See plants.py. The result of a case: {"code", "error", "acted": {rank: names of what its plant has
changed}}; everything else is in its run folder.
"""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from pretrain import trainer
from pretrain.distributed.collectives import gather
from pretrain.distributed.world import running_environment
from pretrain.errors import CorruptionError, GuardError
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.samples import ReplayedSteps
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from tests.distributed.workers.worker import start_of
from tests.extensions.replay.plants import Planter
from tests.support.cases_loop import each_case


def train_planted(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in the process group of all cases."""
    world, planter = running_environment(), Planter(case.get("plant"))
    if dist.get_rank() == 0 and "after" in case:
        shutil.copytree(f"run-{case['after']}", f"run-{case['name']}")
    dist.barrier()
    start = start_of(case)
    callbacks = [planter, *([ReplayedSteps(ReplayOrder(case["last_step"]))] if "last_step" in case else [])]
    kept = {name: patch.object(trainer, name, lambda *args: None) for name in ("init_process_group",
                                                                              "leave_process_group")}
    guards = rank_guards(Path(start.plan.args.save), world, TimeOuts.from_flags(start.plan.args), LauncherWatch(world))
    with guards as guarded, planter.in_data(), kept["init_process_group"], kept["leave_process_group"]:
        try:
            found = {"code": trainer.train(start.plan, world, callbacks, guarded, start.weights), "error": ""}
        except (GuardError, CorruptionError) as error:
            found = {"code": type(error).__name__, "error": str(error)}
    return {**found, "acted": acted_of(planter)}


def acted_of(planter: Planter) -> dict[int, list[str]]:
    """Return what the plants of all ranks have changed, by rank. Collective."""
    return {rank: names for rank, names in enumerate(gather(planter.acted)) if names}


if __name__ == "__main__":
    each_case(train_planted)
