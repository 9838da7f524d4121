"""Pretrain a model: parse the arguments, validate them, build the engine, run the step loop.

    deepspeed pretrain/train.py --deepspeed_config ds_configs/zero2_bf16.json --model gpt2 --train_data data/corpus ...
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # keep pretrain/ off sys.path, so that its modules shadow none of the standard library's
    if not getattr(sys.flags, "safe_path", False):  # python -P and PYTHONSAFEPATH (3.11) put no folder first
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.distributed.process import restart_with_jemalloc

    restart_with_jemalloc()

from pretrain.active_extensions import around_run, prepare_extensions
from pretrain.callback import Callback
from pretrain.checkpoint.load.start import Start, check_start
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import Device, detect_device
from pretrain.distributed.equal_ranks import announce_rejection
from pretrain.distributed.print_error import is_lost_connection, print_error, report_lost_connection
from pretrain.distributed.process import end_process, importing
from pretrain.distributed.process_group import collective_timeout_s
from pretrain.distributed.requirements import workarounds
from pretrain.distributed.world import ALONE, World, running_environment
from pretrain.engine.prepare import avoid_compiler_imports, operator_without_variant, prepare_deepspeed
from pretrain.errors import CRASHED, GUARD, INTERRUPTED, ConfigError, CorruptionError, GuardError, SaveError
from pretrain.extension import RANK_0
from pretrain.remote import StoreError
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import RankGuards, TimeOuts, rank_guards
from pretrain.terminal import clear_status, ignore_lost_output, status


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code. All validation happens before torch is imported.

    0: finished. 1: out of memory, an object store does not answer, copies of a parameter differ, or the last checkpoint
    could not be written. 2: the run was rejected. 75: saved and stopped on request. 76: stopped by the guard against
    bad steps. 77: a rank made no progress (the watchdog ends the process). 130: Ctrl-C before the first step, or a
    second Ctrl-C.
    """
    return run_to_exit_code(lambda: parse_arguments(argv))


def run_to_exit_code(parse: Callable[[], RunArguments], callbacks: Sequence[Callback] = ()) -> int:
    """Run the program on this rank, and return its exit code: errors are printed as one line.

    `parse` may raise ConfigError. `callbacks`: others than those of extensions.
    """
    world = ALONE
    ignore_lost_output()
    try:
        world = running_environment()
        return run(parse(), world, callbacks)
    except ConfigError as error:
        print_error(world, error)
        announce_rejection(world, error)
        return CRASHED if isinstance(error, StoreError) else error.exit_code
    except GuardError as error:
        print_error(world, error)
        return GUARD
    except (SaveError, CorruptionError) as error:
        print_error(world, error)
        return CRASHED
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        report_lost_connection(world, error)
        return CRASHED
    except KeyboardInterrupt:
        if world.rank == 0:
            clear_status()
            print("ds-pretrain: interrupted; nothing was saved since the last checkpoint", file=sys.stderr, flush=True)
        return INTERRUPTED


def run(args: RunArguments, world: World, callbacks: Sequence[Callback] = ()) -> int:
    """Validate the run, then train. Returns the exit code; raises ConfigError."""
    launcher = LauncherWatch(world)
    device = detect_device()
    # the ranks choose the checkpoint again later
    start = check_start(args, world_size=world.size, device=device, complete=world.rank == 0,
                        first_of_host=world.local_rank == 0)
    if world.rank == 0:
        prepare_extensions(start.plan)
    time_outs = TimeOuts.from_flags(args)
    collective_timeout_s(time_outs.longest_s, os.environ)  # rejects a wrong DEEPSPEED_TIMEOUT; DeepSpeed would crash
    with around_run(args, RANK_0, active=world.rank == 0) as report, \
            rank_guards(Path(args.save), world, time_outs, launcher) as guards:
        code = _train(start, world, device, guards, callbacks)
        report(code)
        return code


def _train(start: Start, world: World, device: Device, guards: RankGuards, callbacks: Sequence[Callback]) -> int:
    """Import torch and DeepSpeed, then train a validated run. Returns the exit code."""
    plan = start.plan
    status("loading torch and DeepSpeed")
    with importing(), workarounds():
        prepare_deepspeed(device, deterministic=plan.args.deterministic)
        if not _uses_compiler(plan, device):
            avoid_compiler_imports()
        from pretrain.trainer import train  # imports torch and deepspeed

        if world.rank == 0:
            plan.model.implementation.prove(plan.model, plan.layout.precision, status)

    try:
        return train(plan, world, callbacks, guards, start.weights)
    except RuntimeError as error:
        if operator := operator_without_variant(error):
            raise ConfigError("--deterministic", problem=f"torch has no deterministic variant of {operator}, which the "
                              "model needs", remedy="leave the flag out") from None
        raise


def _uses_compiler(plan: Plan, device: Device) -> bool:
    """Return whether the run uses torch.compile: for the blocks, or on GPUs in DeepSpeed's Muon."""
    return plan.args.compile_blocks or (plan.layout.optimizer == "muon" and device.kind != "cpu")


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        os._exit(code)  # a normal exit would wait for collectives in which the other ranks no longer take part
    end_process(code)
