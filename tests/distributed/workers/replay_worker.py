"""One rank of a test: train runs with a planted fault, and question them with replays in the same processes.

A case is one of

    {"job": "train", ...}       a case of plant_worker.py
    {"job": "replay", "name", "run", "step", "repeats", "plant", "plants"}
                                question step "step" of the run folder "run". The fault "plant" acts in each replay, or
                                "plants" has one for each. The result is the verdict.
    {"job": "damage", "file", "keep"}    cut a file after "keep" bytes
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from pretrain import trainer
from pretrain.analysis.replay.order import ReplayOrder, read_order
from pretrain.analysis.replay.question import Replay, question, read_replay
from pretrain.analysis.replay.target import find_target
from pretrain.checkpoint.load.start import check_start
from pretrain.commands.replay.launch import Layout, prepare
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import detect_device
from pretrain.distributed.world import running_environment
from pretrain.errors import ConfigError, CorruptionError
from pretrain.monitor import announce
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from pretrain.step_loop import StepCallbacks
from tests.distributed.workers.plant_worker import train_planted
from tests.support.cases_loop import each_case
from tests.support.plants import Planter


def replay_in_process(case: dict[str, Any]) -> dict[str, Any]:
    """Question a step, on all ranks: they read the same files, and so come to the same verdict."""
    run, world = Path(case["run"]), running_environment()
    plants = case.get("plants") or [case.get("plant")] * 10

    def train(number: int, order: ReplayOrder) -> Replay:
        folder = Path(f"replays-{case['name']}") / f"replay_{number}"
        if dist.get_rank() == 0:
            prepare(folder, target, Layout(), order)
        dist.barrier()
        groups.mpu = None
        torch.manual_seed(0)
        words = ["--config", str(folder / "run.yaml"), "--deepspeed_config", str(folder / "deepspeed.json"),
                 "--model", str(folder / "config.json"), "--save", str(folder / "run"),
                 "--replay", str(folder / "order.json")]
        start = check_start(parse_arguments(words), world_size=dist.get_world_size(), device=detect_device())
        planter = Planter(plants[number - 1])
        kept = [patch.object(trainer, name, lambda *args: None) for name in ("init_process_group",
                                                                            "leave_process_group")]
        guards = rank_guards(folder / "run", world, TimeOuts.from_flags(start.plan.args), LauncherWatch(world))
        with guards as guarded, planter.in_data(), kept[0], kept[1]:
            try:
                callbacks = StepCallbacks(planter.before_step, replay=read_order(folder / "order.json"))
                trainer.train(start.plan, world, callbacks, guarded, start.weights)
            except CorruptionError as error:
                print(error)
        dist.barrier()
        return read_replay(folder / "run")

    try:
        target = find_target(run, case["step"], case.get("before_rollback"))
        dist.barrier()
        return question(target, train, repeats=case.get("repeats", 2)).verdict.to_json()
    except ConfigError as error:
        return {"kind": "error", "certainty": "sure", "ranks": [], "evidence": [str(error)]}


def damage(case: dict[str, Any]) -> dict[str, Any]:
    if dist.get_rank() == 0:
        os.truncate(case["file"], case["keep"])
    dist.barrier()
    return {}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    with patch.object(announce, "code_record", lambda run: {"commit": None}):  # three processes of git in each start
        return _run_case(case)


def _run_case(case: dict[str, Any]) -> dict[str, Any]:
    return {"train": train_planted, "replay": replay_in_process, "damage": damage}[case["job"]](case)


if __name__ == "__main__":
    each_case(run_case)
