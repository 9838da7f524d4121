"""One rank of test_memory_line.py: train each run of a JSON file, and return the memory line that the run prints.

`memory_line_worker.py CASES.json RESULTS.json`; a case: {"name", "args" (of train.py)}, and
"bytes_freed_elsewhere" if a thread is to free memory that the training thread has allocated in the step.
"""

import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from pretrain.callback import StepResult
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.validate import check_settings
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import end_process
from pretrain.distributed.world import running_environment
from pretrain.engine.build import build_engine, deepspeed_output, remove_swap_files
from pretrain.engine.layer_times import plan_as_built
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.engine.steps import random_batches, train_batch
from pretrain.extensions.memory_watch.watch import REPORTED_STEP, MemoryWatch
from tests.support.callback_runs import run_of
from tests.support.cases_loop import each_case


def memory_line(case: dict[str, Any]) -> str:
    """Train until one step after REPORTED_STEP, and return the memory line. The run must report exactly one line."""
    plan = check_settings(RunArguments(**case["args"]), world_size=dist.get_world_size(), device=detect_device())
    watch, lines = MemoryWatch.before_build(plan, running_environment()), list[str]()
    with deepspeed_output("error"):
        engine = build_engine(plan)
    batches = random_batches(plan)
    run = run_of(plan_as_built(plan, engine), engine, screen=SimpleNamespace(line=lines.append))
    watch.start(run)
    for step in range(1, REPORTED_STEP + 2):
        run.steps_here = step
        watch.before_step(run, batches)
        if "bytes_freed_elsewhere" in case:
            tensors = [torch.empty(case["bytes_freed_elsewhere"], dtype=torch.uint8)]
            thread = threading.Thread(target=tensors.clear)
            thread.start()
            thread.join()
        watch.after_step(run, StepResult(train_batch(engine, batches), 0.0))
        watch.accepted(run)
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        remove_swap_files(plan)
    (line,) = lines
    return line


if __name__ == "__main__":
    prepare_deepspeed(detect_device())
    each_case(memory_line)
    end_process(0)
