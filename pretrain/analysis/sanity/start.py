"""Run the sanity checks at the start of a run (--sanity_check)."""

import time
from collections.abc import Callable

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.analysis.sanity.result import as_json, failed_checks, print_table
from pretrain.analysis.sanity.run_checks import Report, run_checks
from pretrain.analysis.trial_run import remove_trial_files, trial_plan
from pretrain.config.validate import Plan
from pretrain.errors import ConfigError
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal.status import clear_status


def check_before_start(plan: Plan, build: Callable[[Plan], DeepSpeedEngine], folder: RunFolder, report: Report, *,
                       active: bool) -> None:
    """Run all checks, print the table if `active`, and append the event "sanity"; collective.

    Raises ConfigError on all ranks if a check failed.
    """
    began = time.perf_counter()
    results = run_checks(trial_plan(plan), build, report=report)
    dist.barrier()
    remove_trial_files(plan)
    clear_status()
    failed = failed_checks(results)
    print_table(results, active=active)
    folder.event("sanity", step=0, reason=f"failed: {', '.join(failed)}" if failed else "all checks passed",
                 seconds=round(time.perf_counter() - began, 1), checks=as_json(results))
    if failed:
        raise ConfigError("--sanity_check", problem=f"{len(failed)} checks failed ({', '.join(failed)})",
                          remedy="the table above says what to do; without the flag, the run would start")
