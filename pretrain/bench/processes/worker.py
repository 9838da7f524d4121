"""One rank of a baseline: `python -m pretrain.bench.processes.worker RANK JOB`, with JSON lines on stdin and stdout."""

import importlib
import os
import sys
import traceback

from pretrain.bench.processes.baseline_job import THIS_PROJECT, BaselineJob
from pretrain.engine.prepare import prepare_deepspeed

BASELINES = {  # "module.function" in pretrain/bench/baselines/: (job, request loop) -> never returns
    "project": "this_project.project", "bare_engine": "this_project.bare_engine", "loop": "this_project.loop",
    "checkpoint": "this_project.checkpoint", "profile": "this_project.profile",
    "trainer": "peers.trainer", "deepspeed": "peers.deepspeed_loop", "torch": "peers.torch_loop",
    "products": "machine_limits.products", "disk": "machine_limits.disk",
}


def main() -> None:
    """Run the job's baseline until the benchmark sends no more requests. Never returns."""
    rank, job = int(sys.argv[1]), BaselineJob.from_json(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to the log, not between the answers
    if job.device_kind == "cpu":
        os.sched_setaffinity(0, job.cores[rank])
    if job.baseline in THIS_PROJECT:  # the other baselines run without this project's patches
        prepare_deepspeed(job.device)

    from pretrain.bench.processes.request_loop import NoMoreRequests, RequestLoop  # imports torch
    from pretrain.engine.operator_cache import cache_operators

    cache_operators()  # every baseline uses the same compiled operators
    module, function = BASELINES[job.baseline].split(".")
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
    os._exit(code)  # an ordinary exit would wait for the training loops' threads, and the Trainer would save


if __name__ == "__main__":
    main()
