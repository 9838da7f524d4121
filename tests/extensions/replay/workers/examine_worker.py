"""One rank of a test: train each case of a JSON file, and examine the samples of its last step before training it.

A case: {"name", "config", "flags", "last_step", "examine" (whether to examine, else only train)}. It ends after
`last_step`. The run folder is `run-NAME`, and has samples.json.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from pretrain import trainer
from pretrain.distributed.world import running_environment
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.samples import ReplayedSteps
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from tests.distributed.workers.worker import start_of
from tests.support.cases_loop import each_case


def examine(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in the process group of all cases."""
    start = start_of(case)
    callbacks = [ReplayedSteps(ReplayOrder(case["last_step"], steps_after=2 if case.get("examine") else None))] \
        if "last_step" in case else []
    guards = rank_guards(Path(start.plan.args.save), running_environment(), TimeOuts.from_flags(start.plan.args),
                         LauncherWatch(running_environment()))
    with guards as guarded, patch.object(trainer, "init_process_group", lambda *args: None), \
            patch.object(trainer, "leave_process_group", lambda *args: None):
        return {"code": trainer.train(start.plan, running_environment(), callbacks, guarded, start.weights)}


if __name__ == "__main__":
    each_case(examine)
