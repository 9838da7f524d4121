"""Examine this machine, or all hosts of a hostfile: versions, GPUs, operators, disks, limits, clocks.

    ds-pretrain doctor --config run.yaml
    ds-pretrain doctor --hostfile HOSTS --measure

Prints a page of facts, and a line with the remedy for each finding.
Exit codes: 0 no findings (notes are allowed); 2 findings, or bad input.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from pretrain.cli import Parser, whole_number
from pretrain.cluster.hosts.hostfile import hosts_from_flags
from pretrain.cluster.hosts.preflight import words_request
from pretrain.cluster.launcher_flags import LAUNCHER_PROGRAMS, add_host_flags, split_command_line
from pretrain.cluster.multihost_launch import host_transport
from pretrain.config.auto_values import NVME_PATH_VARIABLE
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.process import PROGRAM
from pretrain.errors import REJECTED, ConfigError
from pretrain.extensions.health.doctor import Diagnosis, examine, page

_OF_HOSTS = ("include", "exclude", "num_nodes", "num_gpus", "master_addr", "ssh_port", "launcher")


def main() -> int:
    """Run the program and return its exit code. Raises ConfigError."""
    parser = Parser(description="Examine this machine, or all hosts of a hostfile: versions that fit each other, GPUs, "
                                "compiled operators, libraries, limits, clocks and disks.",
                    epilog="The flags of `ds-pretrain train` are accepted too: the disks of --save and --nvme_path are "
                           "measured, and all hosts must have the files that the flags name. Exit code 0: no findings; "
                           "2: findings, or bad input.")
    add_host_flags(parser)
    add = parser.add_argument
    add("--launcher", choices=sorted(LAUNCHER_PROGRAMS), default="pdsh",
        help="how the hosts are reached: by srun with slurm, otherwise by ssh (default: %(default)s)")
    add("--master_port", type=whole_number(1, 65535), help="with --measure: free port on the first host")
    add("--json", action="store_true", help="print one JSON object instead of the page")
    add("--measure", action="store_true",
        help="also measure devices, disks and the network, with `ds-pretrain check-cluster` on all ranks (minutes)")
    words = sys.argv[1:]
    own, rest = parser.parse_known_args(words)
    if own.json and own.measure:
        raise ConfigError("--json", problem="it prints the page only",
                          remedy="for measurements, use `ds-pretrain check-cluster --json`")
    useless = {**dict.fromkeys(_OF_HOSTS, own.hostfile is None and not own.measure), "master_port": not own.measure}
    for name in (name for name, is_useless in useless.items() if is_useless):
        if getattr(own, name) != parser.get_default(name):
            needed = "--measure" if name == "master_port" else "--hostfile"
            raise ConfigError(f"--{name}", problem=f"it has no effect without {needed}",
                              remedy=f"remove it, or give {needed}")
    diagnosis = _examine(own, rest)
    print(json.dumps(diagnosis.to_json(), indent=1) if own.json else "\n".join(page(diagnosis)), flush=True)
    is_bad = bool(diagnosis.findings)
    if own.measure and not diagnosis.can_launch:
        print("not measured: first repair the hosts")
    elif own.measure:
        is_bad |= _measure([word for word in words if word != "--measure"]) != 0
    return REJECTED if is_bad else 0


def _examine(own: argparse.Namespace, rest: list[str]) -> Diagnosis:
    """Examine this machine or the hosts. `rest`: flags of a run."""
    run = parse_arguments(rest)
    folders = {"--save" if run.save else "this folder": str(Path(run.save or ".").absolute())}
    nvme = run.nvme_path or os.environ.get(NVME_PATH_VARIABLE)
    folders |= {"--nvme_path": str(Path(nvme).absolute())} if nvme else {}
    request = words_request(rest, Path.cwd())
    if own.hostfile is None:
        return examine(folders, request, None, {})
    ranks = {host: len(slots) for host, slots in hosts_from_flags(own).items()}
    request = dataclasses.replace(request, run=Path(run.save).absolute() if run.save else None)
    return examine(folders, request, host_transport(own), ranks)


def _measure(words: list[str]) -> int:
    """Measure with all ranks of the hosts, or of this machine. Returns the exit code of the check."""
    print("\nMeasuring with `ds-pretrain check-cluster`:", flush=True)
    launcher_words, rest = split_command_line(words)
    command = [sys.executable, PROGRAM, "train", *launcher_words, "check-cluster", *rest]
    return subprocess.run(command, check=False).returncode
