"""One rank of tests/distributed/test_sanity.py: check a healthy run, or one with a planted bug."""

import time
from dataclasses import asdict
from typing import Any

from deepspeed.utils import groups

from pretrain.analysis.sanity.run_checks import run_checks
from pretrain.engine.build import build_engine
from tests.distributed.workers.worker import Case, plan_of
from tests.support.cases_loop import each_case


def check(case: Case) -> dict[str, Any]:
    """Return the results by name, and the time of all checks in seconds."""
    plan = plan_of(case)
    groups.mpu = None
    began = time.perf_counter()
    results = run_checks(plan, build_engine, report=lambda line: print(f"{time.perf_counter() - began:.1f} {line}"))
    return {"results": {result.check: asdict(result) for result in results}, "seconds": time.perf_counter() - began}


def run_case(case: Case) -> Any:
    return globals()[case["job"]](case)


if __name__ == "__main__":
    each_case(run_case)
