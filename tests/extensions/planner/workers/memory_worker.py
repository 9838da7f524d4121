"""One rank of test_measure.py: measure a few real steps of each run in a JSON file.

`memory_worker.py CASES.json RESULTS.json`; a case: {"name", "args" (of train.py)}.
"""

from typing import Any

import torch.distributed as dist

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.validate import check_settings
from pretrain.distributed.device import detect_device
from pretrain.engine.build import deepspeed_output, remove_swap_files
from pretrain.extensions.planner.measure.measure_run import measure_engine
from tests.support.cases_loop import each_case


def measured(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure one case. Returns the result of every rank."""
    plan = check_settings(RunArguments(**case["args"]), world_size=dist.get_world_size(), device=detect_device())
    with deepspeed_output("error"):
        result = measure_engine(plan, tracked_steps=2, timed_steps=0)
    dist.barrier()
    if dist.get_rank() == 0:
        remove_swap_files(plan)
    return result


if __name__ == "__main__":
    each_case(measured)
