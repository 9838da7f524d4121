"""Begin the flight record of a start: choose its folder, remove old records, write the header of each rank."""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine

from pretrain.config.plan import Plan
from pretrain.distributed.collectives import from_rank_0
from pretrain.distributed.world import World
from pretrain.engine.parallelism import rank_order
from pretrain.monitor.flight.record_files import Header, RecordFile, prune_starts, start_folder
from pretrain.monitor.flight.recorder import FlightRecorder, HeldStates
from pretrain.monitor.read_run_folder import newest_start_number
from pretrain.terminal import Screen


def begin_record(plan: Plan, world: World, engine: DeepSpeedEngine, screen: Screen, states: HeldStates, *,
                 first_step: int, set_path: Callable[[Path], None]) -> FlightRecorder:
    """Return the recorder of this rank, after run.json has the record of this start. Collective.

    Args:
        set_path: gives the path of the record to the watcher of this rank.
    """
    args, run = plan.args, Path(plan.args.save)
    recorder = FlightRecorder(engine, states, run, interval=args.flight_interval, is_on=args.flight_steps > 0,
                              warn=partial(_warn, screen, world))
    if not args.flight_steps:
        return recorder
    start = from_rank_0(partial(newest_start_number, run))
    header = Header(rank=world.rank, world_size=world.size, host=socket.gethostname(), pid=os.getpid(),
                    first_step=first_step, coordinates=rank_order(plan.layout).coordinates(world.rank),
                    layers=recorder.layers, interval=args.flight_interval or 0, start=start)
    recorder.open(lambda: RecordFile(start_folder(run, start), header, steps=args.flight_steps))
    set_path(start_folder(run, start) / f"rank_{world.rank}.jsonl")
    if world.rank == 0:
        prune_starts(run, start)
    return recorder


def _warn(screen: Screen, world: World, line: str) -> None:
    """Report a problem of the files: one line from each host, whose ranks share its disks."""
    if world.rank == 0:
        screen.line(line)
    elif world.local_rank == 0:
        print(f"{socket.gethostname()}: {line}", file=sys.stderr, flush=True)
