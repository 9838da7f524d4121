"""What the workers of multi-rank tests share: the cases of a JSON file, one after another, in one process group."""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import deepspeed_output


def each_case(run: Callable[[dict[str, Any]], Any]) -> None:
    """Be `WORKER CASES.json RESULTS.json`: `run` every case on every rank; rank 0 writes what it returns, by name."""
    with deepspeed_output("error"):
        init_process_group(running_environment())
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        start = time.perf_counter()
        groups.mpu = None  # the last pipeline's topology, which the next engine would take for its own
        torch.manual_seed(0)
        results[case["name"]] = run(case)
        gc.collect()
        print(f"case {case['name']}: {time.perf_counter() - start:.1f} s", flush=True)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
