"""One rank of a test: train runs with a planted fault, and examine them with replays in the same processes.

A case is one of

    {"job": "train", ...}       a case of plant_worker.py
    {"job": "replay", "name", "run", "step", "repeats", "plant"}
                                examine step "step" of the run folder "run". The fault "plant" acts in each replay. The
                                result is that of the replay.
    {"job": "replays", "name", "run", "step", "replays"}
                                train replays, and leave the result to the caller. Each of "replays" is {"folder",
                                "plant", "cross_check", "examine"}. The result is {"error"}.

Each result also has "cpu_s": the CPU time of all ranks.
"""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from pretrain import trainer
from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.collectives import gather
from pretrain.distributed.device import detect_device
from pretrain.distributed.world import running_environment
from pretrain.errors import ConfigError, CorruptionError
from pretrain.extensions.replay.examine_step import Layout, Replay, examine, order_of, prepare, read_replay
from pretrain.extensions.replay.extension import ReplayOrder, read_order
from pretrain.extensions.replay.target import Target, find_target
from pretrain.monitor import announce
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from tests.extensions.replay.plants import Plant, Planter
from tests.extensions.replay.workers.plant_worker import acted_of, train_planted
from tests.support.cases_loop import each_case


def train_replay(folder: Path, target: Target, order: ReplayOrder, plant: Plant | None) -> Replay:
    """Train a replay in these processes, as `train_again` does with new ones."""
    if dist.get_rank() == 0:
        prepare(folder, target, Layout(), order)
    dist.barrier()
    groups.mpu = None
    torch.manual_seed(0)
    world = running_environment()
    words = ["--config", str(folder / "run.yaml"), "--deepspeed_config", str(folder / "deepspeed.json"),
             "--model", str(folder / "config.json"), "--save", str(folder / "run"),
             "--replay", str(folder / "order.json")]
    start = check_start(parse_arguments(words), world_size=dist.get_world_size(), device=detect_device())
    order, planter = read_order(folder / "order.json"), Planter(plant)
    kept = [patch.object(trainer, name, lambda *args: None) for name in ("init_process_group", "leave_process_group")]
    guards = rank_guards(folder / "run", world, TimeOuts.from_flags(start.plan.args), LauncherWatch(world))
    with guards as guarded, planter.in_data(), kept[0], kept[1]:
        try:
            trainer.train(start.plan, world, [planter], guarded, start.weights)
        except CorruptionError as error:
            print(error)
    assert plant is None or acted_of(planter), f"the plant {plant} has not acted"
    return read_replay(folder / "run")


def replay_in_process(case: dict[str, Any]) -> dict[str, Any]:
    """Examine a step, on all ranks: they read the same files, and so come to the same result."""
    target = find_target(Path(case["run"]), case["step"], case.get("before_rollback"))
    dist.barrier()

    def train(number: int, order: ReplayOrder) -> Replay:
        return train_replay(Path(f"replays-{case['name']}") / f"replay_{number}", target, order, case.get("plant"))

    return examine(target, train, repeats=case.get("repeats", 2)).result.to_json()


def train_replays(case: dict[str, Any]) -> dict[str, Any]:
    """Train the replays of a case."""
    try:
        target = find_target(Path(case["run"]), case["step"])
        dist.barrier()
        for each in case["replays"]:
            order = ReplayOrder(target.step, target.consumed_samples, order_of(target).vetoed,
                                bool(each.get("cross_check")), 1 if each.get("examine") else None)
            train_replay(Path(each["folder"]), target, order, each.get("plant"))
    except ConfigError as error:
        return {"error": str(error)}
    return {"error": ""}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    began, job = time.process_time(), {"train": train_planted, "replay": replay_in_process, "replays": train_replays}
    with patch.object(announce, "code_record", lambda run: {"commit": None}):  # three processes of git in each start
        result = job[case["job"]](case)
    return {**result, "cpu_s": sum(gather(time.process_time() - began))}


if __name__ == "__main__":
    each_case(run_case)
