"""One rank of a measured run: `python -m pretrain.memory.measure.measure_rank REQUEST.json`, started by measure_run.py.

The request is {"args": RunArguments, "tracked_steps": N, "timed_steps": N}. Rank 0 writes REQUEST.result.json. A rank
that fails writes one line to REQUEST.error.RANK.
"""

import contextlib
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import end_process, resident_bytes
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World, running_environment
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError


def measure_engine(plan: Plan, *, tracked_steps: int, timed_steps: int) -> list[dict[str, Any]]:
    """Build the plan's engine, train, and destroy the engine. Every rank of the process group must call this.

    Returns the results of all ranks, on every rank: {"memory": RankMemory as JSON, "layer_times", "step_times_ms"}.
    """
    import torch.distributed as dist

    from pretrain.distributed.collectives import gather
    from pretrain.engine.attachments import attachments
    from pretrain.engine.build import build_engine
    from pretrain.memory.measure.observe_steps import StorageTracker, observe_steps, time_steps
    from pretrain.memory.measure.tensor_inventory import nvme_footprint

    tracker = StorageTracker() if detect_device().kind == "cpu" else None
    with tracker or contextlib.nullcontext():
        engine = build_engine(plan)
        memory = observe_steps(engine, plan, steps=tracked_steps, tracker=tracker)
    memory = replace(memory, held=memory.held + nvme_footprint(engine, dist.get_rank()))
    times = time_steps(engine, plan, timed_steps)
    memory = replace(memory, resident_bytes=resident_bytes()[0])
    results = gather({"memory": memory.to_json(), "layer_times": list(attachments(engine).layer_times),
                      "step_times_ms": times})
    engine.destroy()
    return results


def run(request: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Measure the requested run. Returns every rank's result. Raises ConfigError."""
    from pretrain.config.validate import check_settings

    device = detect_device()
    plan = check_settings(RunArguments(**request["args"]), world_size=world.size, device=device)
    from pretrain.engine.build import deepspeed_output, remove_swap_files

    with deepspeed_output("error"):
        init_process_group(world)
        try:
            return measure_engine(plan, tracked_steps=request["tracked_steps"], timed_steps=request["timed_steps"])
        finally:
            if world.local_rank == 0:
                remove_swap_files(plan)


def main(path: Path) -> int:
    """Return the exit code: 0; 1 if the run failed; 2 if it was rejected."""
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
