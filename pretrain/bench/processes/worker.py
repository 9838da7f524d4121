"""One rank of a baseline: `python -m pretrain.bench.processes.worker RANK JOB`.

It reads requests from its standard input and writes answers to its standard output, both as lines of JSON.
"""

import importlib
import os
import sys
import traceback

from pretrain.bench.processes.baseline_job import PROJECT_BASELINES, BaselineJob
from pretrain.engine.prepare import prepare_deepspeed

# baseline -> "module.function" of its main function in pretrain/bench/baselines/
MAIN_FUNCTIONS = {
    "project": "this_project.project", "bare_engine": "this_project.bare_engine", "loop": "this_project.loop",
    "guarded_loop": "guarded_loop.guarded_loop",
    "two_schedules": "two_schedules.two_schedules",
    "checkpoint": "checkpoints.checkpoint", "profile": "this_project.profile",
    "trainer": "peers.trainer", "deepspeed": "peers.deepspeed_loop", "torch": "peers.torch_loop",
    "plain": "plain_modules.plain_loop", "plain_profile": "plain_modules.plain_profile",
    "products": "machine_limits.products", "disk": "machine_limits.disk",
}


def main() -> None:
    """Run the job's baseline until the benchmark ends it, then exit this process."""
    rank, job = int(sys.argv[1]), BaselineJob.from_json(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # standard output now leads to the log, so that libraries print nothing between the answers
    if job.device_kind == "cpu":
        os.sched_setaffinity(0, job.cores[rank])
    if job.baseline in PROJECT_BASELINES:  # other programs import DeepSpeed without this preparation
        prepare_deepspeed(job.device)

    from pretrain.bench.processes.request_loop import NoMoreRequests, RequestLoop  # imports torch
    from pretrain.engine.operators.operator_cache import cache_operators

    cache_operators()  # all baselines use the same compiled operators
    module, function = MAIN_FUNCTIONS[job.baseline].split(".")
    requests, code = RequestLoop(answers, sys.stdin, cuda=job.device_kind == "cuda"), 0
    try:
        baseline = getattr(importlib.import_module(f"pretrain.bench.baselines.{module}"), function)
        requests.wait_for_build()
        baseline(job, requests)
    except NoMoreRequests:
        pass
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        requests.answer({"error": text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"})
        code = 1
    sys.stderr.flush()
    os._exit(code)  # sys.exit would wait for threads of the training loops, such as those of the data loader


if __name__ == "__main__":
    main()
