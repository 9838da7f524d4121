"""One rank of test_memory_measure.py: a few real steps of each of the runs in a JSON file, one after another.

`memory_worker.py CASES.json RESULTS.json`; a case: {"name", "args" (of train.py)}.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from deepspeed.utils import groups

from pretrain.arguments import RunArguments
from pretrain.device import detect_device
from pretrain.distributed import init_process_group, running_environment
from pretrain.engine import deepspeed_output, remove_swap_files
from pretrain.memory.measure_rank import measure_here
from pretrain.memory.steps import plan_without_data


def main() -> None:
    with deepspeed_output("error"):
        init_process_group(running_environment())
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        begin = time.perf_counter()
        plan = plan_without_data(RunArguments(**case["args"]), world_size=dist.get_world_size(),
                                 device=detect_device())
        groups.mpu = None  # else the next engine takes the last pipeline's topology for its own
        with deepspeed_output("error"):
            results[case["name"]] = measure_here(plan, tracked_steps=2, timed_steps=1)
        dist.barrier()
        if dist.get_rank() == 0:
            remove_swap_files(plan)
        gc.collect()
        print(f"case {case['name']}: {time.perf_counter() - begin:.1f} s", flush=True)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
