"""Main function of the workers of multi-rank tests: run the cases of a JSON file in one process group."""

import gc
import json
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.utils import groups
from torch.distributed.distributed_c10d import _world

from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import deepspeed_output


def each_case(run: Callable[[dict[str, Any]], Any]) -> None:
    """Run the program `WORKER CASES.json RESULTS.json`: call `run` with each case on every rank.

    Rank 0 writes the results by case name after each case, so that the results before a failed case are kept.
    """
    engines: list[weakref.ref[DeepSpeedEngine]] = []
    build = DeepSpeedEngine.__init__

    def build_listed(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        build(engine, *args, **kwargs)
        engines.append(weakref.ref(engine))

    DeepSpeedEngine.__init__ = build_listed
    with deepspeed_output("error"):
        init_process_group(running_environment())
    results: dict[str, Any] = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        start, start_cpu = time.perf_counter(), time.process_time()
        groups.mpu = None  # otherwise the next engine would use the topology of the last pipeline
        torch.manual_seed(0)
        results[case["name"]] = run(case)
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))
        _destroy_groups()
        _empty(engines)
        gc.collect()
        cpu = time.process_time() - start_cpu
        print(f"case {case['name']}: {time.perf_counter() - start:.1f} s, CPU {cpu:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _empty(engines: list[weakref.ref[DeepSpeedEngine]]) -> None:
    """Empty the engines of a case: the garbage collector does not free all of them, with their process groups."""
    for each in engines:
        engine = each()
        if engine is not None:
            vars(engine).clear()
    engines.clear()


def _destroy_groups() -> None:
    """Destroy the process groups of the last engine, and DeepSpeed's references to them.

    Each group of gloo has threads that wake up 100 times a second.
    """
    dist.barrier()  # no rank destroys a group in which another one still communicates
    created = [group for group in _world.pg_map if group is not dist.group.WORLD]
    for group in created:
        dist.destroy_process_group(group)
    for name, value in vars(groups).items():
        if isinstance(value, dict):
            for key in [key for key, group in value.items() if group in created]:
                del value[key]
        elif value in created:
            setattr(groups, name, None)
