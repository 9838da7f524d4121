"""One rank of the tests of evaluations inside a run: run `trainer.train` for each case."""

import sys
from pathlib import Path
from typing import Any

from pretrain import trainer
from pretrain.distributed.world import running_environment
from pretrain.errors import ConfigError
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from tests.distributed.workers.worker import Case, start_of
from tests.support.cases_loop import each_case


def run(case: Case) -> dict[str, Any]:
    """Train the case. Return the exit code, or the error with which the run was rejected."""
    start, world = start_of(case), running_environment()
    with rank_guards(Path(start.plan.args.save), world, TimeOuts.from_flags(start.plan.args),
                     LauncherWatch(world)) as guards:
        try:
            return {"code": trainer.train(start.plan, world, [], guards, start.weights)}
        except ConfigError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    trainer.init_process_group = lambda *_: None
    trainer.leave_process_group = lambda: None
    each_case(run)
    sys.exit(0)
