"""Check whether a cluster is fit for a long job. Start this tool with the launcher of the job, on every rank:

    ds-pretrain check-cluster --hostfile HOSTS --save runs/gpt2
    srun ds-pretrain check-cluster --config run.yaml

With the flags of a run (--model, --deepspeed_config or a --config with these), every host also validates the run and
checks that its checkpoint fits on the disk.
The tool prints one line for each finding, with the name of the host.

Exit codes: 0 no findings; 1 findings, or rank 0 cannot be reached; 2 bad input.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import NoReturn

from pretrain.cli import LONGEST_SECONDS, Parser, number, run_main, whole_number
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import detect_device
from pretrain.distributed.print_error import print_error
from pretrain.distributed.world import ALONE, running_environment
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError
from pretrain.extensions.health.report import ClusterCheckSettings
from pretrain.paths import check_folder
from pretrain.progress import terminal_console

_MIB = 2**20
_SECONDS = number(0.1, LONGEST_SECONDS)
_MAX_MIB = 2**30
_NUMBERS = (  # name, type, default, help
    ("product_size", whole_number(1, 2**20), None,
     "rows and columns of the multiplied matrices (default: 1024 on CPUs, otherwise 8192)"),
    ("memory_mib", whole_number(1, _MAX_MIB), None,
     "MiB filled on each device (default: at most 256 on CPUs, otherwise 80%% of the free memory)"),
    ("message_mib", whole_number(1, _MAX_MIB), None, "MiB of a transfer (default: 16 on CPUs, otherwise 256)"),
    ("disk_mib", whole_number(1, _MAX_MIB), 256, "MiB written on each host (default: %(default)s)"),
    ("rounds", whole_number(), 32,
     "number of other hosts with which each host is measured; 0: all (default: %(default)s)"),
    ("timeout", _SECONDS, 60.0, "seconds that one measurement may take; ranks may start within twice this time "
     "(default: %(default)s)"),
    ("min_ratio", number(0.001, 1), None,
     "report a value below this fraction of the median, or a latency above the median divided by this fraction "
     "(default: matrix products and free memory 0.8, memory and all-reduce inside a host 0.7, network 0.6, disk 0.4, "
     "latency 0.25)"),
    ("min_gbit", number(0, 1e6), 0.0, "Gbit/s that each pair of hosts must reach (default: no minimum)"),
    ("max_clock_skew", number(0, LONGEST_SECONDS), 1.0,
     "largest allowed difference in seconds of a host's clock from the median clock (default: %(default)s)"),
)


def parse(words: list[str]) -> tuple[ClusterCheckSettings, bool]:
    """Return (settings, whether to print JSON). Raises ConfigError; `--help` exits with 0."""
    parser = Parser(description="Check whether a cluster is fit for a long job.",
                    epilog="The flags of `ds-pretrain train` are accepted too. --save RUN: folder whose disk is "
                           "measured (default: the current folder). If the flags or --config give a --model or a "
                           "--deepspeed_config, the run is also validated, and its checkpoint must fit on that disk.")
    for name, parse_number, default, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=parse_number, default=default, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    own, rest = parser.parse_known_args(words)
    run = parse_arguments(rest)
    run = dataclasses.replace(run, save=run.save or ".")
    check_folder(Path(run.save), "--save")
    return ClusterCheckSettings(
        folder=Path(run.save), run=run if run.model or run.deepspeed_config else None, product_size=own.product_size,
        memory_bytes=own.memory_mib and own.memory_mib * _MIB, disk_bytes=own.disk_mib * _MIB,
        message_bytes=own.message_mib and own.message_mib * _MIB, rounds=own.rounds, timeout_s=own.timeout,
        min_ratio=own.min_ratio, min_gbit_per_s=own.min_gbit, max_clock_skew_s=own.max_clock_skew), own.json


def main() -> NoReturn:
    """Run the check, and end the process: a hanging transfer must not keep it alive."""
    try:
        run_main(lambda: check(sys.argv[1:]))
    except SystemExit as end:
        sys.stdout.flush()  # --help
        os._exit(int(end.code or 0))


def check(words: list[str]) -> int:
    """Run the check and return the exit code."""
    world = ALONE
    try:
        world = running_environment()
        settings, as_json = parse(words)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch prints no error: this tool prints it in one line
        prepare_deepspeed(detect_device())  # imports torch, which reads the variable
        from pretrain.extensions.health.check import check_cluster  # imports torch and deepspeed
        from pretrain.extensions.health.report import report_lines, report_table

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
        # Set the width: under a launcher, stdout is a pipe without a width, and rich would cut off the rows.
        terminal_console(width=200).print(report_table(report))
        print("\n".join(report_lines(report)))
    return 1 if report.findings else 0

