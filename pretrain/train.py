"""Pretrain a model: arguments -> plan, checked -> engine -> the step loop.

    deepspeed pretrain/train.py --deepspeed_config ds_configs/zero2_bf16.json --model gpt2 --train_data data/corpus ...
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the folder of this file has modules with common names: let it shadow none
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from pretrain.distributed.allocator import restart_with_jemalloc

    restart_with_jemalloc()

from pretrain.checkpoint.load.resume import choose_resume
from pretrain.config.arguments import RunArguments, parse_arguments
from pretrain.config.validate import Plan, check_run
from pretrain.console.status import clear_status, status
from pretrain.distributed.device import detect_device
from pretrain.distributed.print_error import print_error
from pretrain.distributed.process import end_process
from pretrain.distributed.world import ALONE, World, running_environment
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import CRASHED, INTERRUPTED, REJECTED, ConfigError, SaveError
from pretrain.patches.imports import avoid_compiler_imports


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 finished, 1 without its last checkpoint or out of memory, 2 rejected, 75 stopped by a signal, 130
    interrupted before it trained, or by a second Ctrl-C.

    Whatever can be refused is, before torch is imported or a process joins.
    """
    world = ALONE
    try:
        world = running_environment()
        return run(parse_arguments(argv), world)
    except ConfigError as error:
        print_error(world, error)
        return REJECTED
    except SaveError as error:
        print_error(world, error)
        return CRASHED
    except KeyboardInterrupt:
        if world.rank == 0:
            clear_status()
            print("ds-pretrain: interrupted; nothing was saved since the last checkpoint", file=sys.stderr, flush=True)
        return INTERRUPTED


def run(args: RunArguments, world: World) -> int:
    """Judge the run, and train if it passes. Returns the exit code; raises ConfigError."""
    device = detect_device()
    plan = check_run(args, world_size=world.size, device=device)
    choose_resume(plan)  # to refuse early; what is there may change meanwhile: the ranks agree on it later
    status("loading torch and DeepSpeed")
    prepare_deepspeed(device)
    if not _compiles(plan):
        avoid_compiler_imports()
    from pretrain.memory.report.memory_watch import MemoryWatch, print_advice
    from pretrain.trainer import train  # imports torch and deepspeed

    watch = MemoryWatch.start(plan, world)
    try:
        return train(plan, world, watch)
    except (MemoryError, RuntimeError, OSError) as error:
        advice = watch.explain(error)
        if not advice:
            raise
        print_advice(advice, world)
        return CRASHED


def _compiles(plan: Plan) -> bool:
    """Whether anything of the run goes through torch.compile: DeepSpeed's Muon does."""
    optimizer = str(plan.ds_config.get("optimizer", {}).get("type", "")).lower()
    return plan.args.compile_blocks or bool(plan.ds_config.get("compile")) or optimizer == "muon"


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        os._exit(code)  # an orderly end would wait for collectives in which the other ranks no longer take part
    end_process(code)
