"""A baseline's process: python -m pretrain.bench.processes.worker RANK JOB. Exchanges JSON lines over stdin and stdout.
"""

import importlib
import os
import sys
import traceback

from pretrain.bench.processes.baseline_job import OURS, Job
from pretrain.engine.prepare import prepare_deepspeed

CONTENDERS = {  # module and function: (job, rounds) -> never returns
    "project": "this_project.project", "bare_engine": "this_project.bare_engine", "loop": "this_project.loop",
    "checkpoint": "this_project.checkpoint", "trainer": "peers.trainer", "deepspeed": "peers.deepspeed_loop",
    "torch": "peers.torch_loop", "products": "machine_limits.products", "disk": "machine_limits.disk",
}


def main() -> None:
    """Never returns; ends when the requests do."""
    rank, job = int(sys.argv[1]), Job.from_json(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if job.device_kind == "cpu":
        os.sched_setaffinity(0, job.cores[rank])
    if job.contender in OURS:  # the others run as they come
        prepare_deepspeed(job.device)

    from pretrain.bench.processes.request_loop import Ended, Rounds  # imports torch
    from pretrain.engine.operator_cache import cache_operators

    cache_operators()  # the same operators for all: none of the baselines compiles its own
    module, function = CONTENDERS[job.contender].split(".")
    rounds, code = Rounds(answers, sys.stdin, cuda=job.device_kind == "cuda"), 0
    try:
        contender = getattr(importlib.import_module(f"pretrain.bench.baselines.{module}"), function)
        rounds.wait_for_build()
        contender(job, rounds)
    except Ended:
        pass
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        rounds.answer({"error": text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"})
        code = 1
    sys.stderr.flush()
    os._exit(code)  # loops of others hold threads, and would save


if __name__ == "__main__":
    main()
