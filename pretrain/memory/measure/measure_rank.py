"""One rank of a measured run: `python -m pretrain.memory.measure.measure_rank JOB.json`, started by `measure.py`.

The job: {"args": RunArguments, "tracked_steps", "timed_steps"}. Rank 0 writes JOB.result.json; a rank that fails writes
JOB.error.RANK with one line, and exits with 1.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from pretrain.config.arguments import RunArguments
from pretrain.config.validate import Plan
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import end_process, resident_bytes
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World, running_environment
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError


def measure_here(plan: Plan, *, tracked_steps: int, timed_steps: int) -> list[dict[str, Any]]:
    """Build the plan's engine, train, and tear it down: what each rank saw, on every rank. The process group must
    exist. Of one rank: `Observation.to_json`, with "nvme" (as `held`), "step_times_ms", "rss_bytes", "peak_rss_bytes".
    """
    import torch.distributed as dist

    from pretrain.distributed.collectives import gather
    from pretrain.engine.build import build_engine
    from pretrain.memory.measure.observe_steps import observe, time_steps
    from pretrain.memory.measure.storage_tracker import StorageTracker
    from pretrain.memory.measure.tensor_inventory import on_nvme

    tracker = StorageTracker() if detect_device().kind == "cpu" else None
    with tracker or contextlib.nullcontext():
        engine = build_engine(plan)
        seen = observe(engine, plan, steps=tracked_steps, tracker=tracker).to_json()
    seen["nvme"] = on_nvme(engine, dist.get_rank()).to_json()
    seen["step_times_ms"] = time_steps(engine, plan, timed_steps)
    seen["rss_bytes"], seen["peak_rss_bytes"] = resident_bytes()
    results = gather(seen)
    engine.destroy()
    return results


def run(job: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Every rank's result. Raises ConfigError."""
    from pretrain.config.validate import plan_without_data

    device = detect_device()
    plan = plan_without_data(RunArguments(**job["args"]), world_size=world.size, device=device)
    from pretrain.engine.build import deepspeed_output, remove_swap_files

    with deepspeed_output("error"):
        init_process_group(world)
        try:
            return measure_here(plan, tracked_steps=job["tracked_steps"], timed_steps=job["timed_steps"])
        finally:
            if world.local_rank == 0:
                remove_swap_files(plan)


def main(path: Path) -> int:
    """Exit code: 0, 1 for a run that failed, 2 for one that was refused."""
    world = running_environment()
    prepare_deepspeed(detect_device())
    try:
        results = run(json.loads(path.read_text()), world)
    except ConfigError as error:
        path.with_suffix(f".error.{world.rank}").write_text(str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        path.with_suffix(f".error.{world.rank}").write_text(f"{type(error).__name__}: {error}".splitlines()[0])
        return 1
    if world.rank == 0:
        path.with_suffix(".result.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
