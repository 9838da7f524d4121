#!/usr/bin/env python3
"""Is this cluster fit for a long job? To be started on every rank, by the launcher that will start the job:

    deepspeed --hostfile HOSTS tools/check_cluster.py --save runs/gpt2
    srun python tools/check_cluster.py --config run.yaml

With the flags of pretrain/train.py the run is judged on every host, and its checkpoint must fit on the disk.
Exit codes: 0 all is well; 1 something is wrong, a line for each, with the host; 2 bad input.
"""

import dataclasses
import os
import sys
from pathlib import Path

from rich.console import Console

from pretrain.cli import LONGEST_SECONDS, Parser, number, run_main, whole_number
from pretrain.cluster.health.settings import Settings
from pretrain.config.arguments import parse_arguments
from pretrain.distributed.device import detect_device
from pretrain.distributed.print_error import print_error
from pretrain.distributed.world import ALONE, running_environment
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

_MIB = 2**20


_SECONDS = number(0.1, LONGEST_SECONDS)
_MOST_MIB = 2**30
_NUMBERS = (  # name, type, default, help
    ("product_size", whole_number(1, 2**20), None,
     "rows of the matrices that are multiplied (1024 on CPUs, 8192 otherwise)"),
    ("memory_mib", whole_number(1, _MOST_MIB), None,
     "MiB filled on each device (256 on CPUs, otherwise 80%% of what is free)"),
    ("message_mib", whole_number(1, _MOST_MIB), None, "MiB of a transfer (16 on CPUs, 256 otherwise)"),
    ("disk_mib", whole_number(1, _MOST_MIB), 256, "MiB written on each host (%(default)s)"),
    ("rounds", whole_number(), 32, "other hosts that each host is measured with; 0: all (%(default)s)"),
    ("timeout", _SECONDS, 60.0, "seconds that one measurement may take; the ranks may join within twice that "
     "(%(default)s)"),
    ("min_ratio", number(0.001, 1), None,
     "fraction of the median below which a rate stands out, and above whose inverse a latency does "
     "(products and free memory 0.8, memory and inside a host 0.7, network 0.6, disk 0.4, latency 0.25)"),
    ("min_gbit", number(0, 1e6), 0.0, "Gbit/s that every pair of hosts must reach (none)"),
    ("max_clock_skew", number(0, LONGEST_SECONDS), 1.0, "seconds (%(default)s)"),
)


def parse(words: list[str]) -> tuple[Settings, bool]:
    """(settings, whether to print JSON). Raises ConfigError; `--help` exits 0."""
    parser = Parser(prog="tools/check_cluster.py", description="Is this cluster fit for a long job?",
                    epilog="--save RUN: folder whose disk is measured (default: the current one). With the other flags "
                           "of pretrain/train.py, --config too, the run is judged, and its checkpoint must fit there.")
    for name, kind, default, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    own, rest = parser.parse_known_args(words)
    run = parse_arguments(rest)
    run = dataclasses.replace(run, save=run.save or ".")
    check_folder(Path(run.save), "--save")
    return Settings(
        folder=Path(run.save), run=run if run.model or run.deepspeed_config else None, product_size=own.product_size,
        memory_bytes=own.memory_mib and own.memory_mib * _MIB, disk_bytes=own.disk_mib * _MIB,
        message_bytes=own.message_mib and own.message_mib * _MIB, rounds=own.rounds, timeout_s=own.timeout,
        min_ratio=own.min_ratio, min_gbit_per_s=own.min_gbit, max_clock_skew_s=own.max_clock_skew), own.json


def main(words: list[str]) -> int:
    """The exit code."""
    world = ALONE
    try:
        world = running_environment()
        settings, as_json = parse(words)
        prepare_deepspeed(detect_device())
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what goes wrong is told below, in a line
        from pretrain.cluster.health.check import check_cluster  # imports torch and deepspeed
        from pretrain.cluster.health.report import lines, table

        report = check_cluster(settings, world)
    except ConfigError as error:
        print_error(world, error)
        return 2
    except ConnectionError as error:
        print_error(world, error)
        return 1
    if world.rank == 0 and as_json:
        print(report.to_json())
    elif world.rank == 0:
        # a launcher's pipe or terminal has no width that a row could be cut to
        Console(width=200, highlight=False, markup=False).print(table(report))
        print("\n".join(lines(report)))
    return 1 if report.findings else 0


if __name__ == "__main__":
    try:
        run_main(lambda: main(sys.argv[1:]))
    except SystemExit as end:
        os._exit(int(end.code or 0))  # a transfer that hangs must not hold the process
