"""`ds-pretrain train`: validate a run, then start DeepSpeed's launcher on this host or on several hosts.

    ds-pretrain --num_gpus 2 --config run.yaml
    ds-pretrain --hostfile hosts pretrain/train.py --config run.yaml
    ds-pretrain --hostfile hosts evaluate runs/gpt2

The command accepts most flags of `deepspeed` (cluster/launcher_flags.py) and all flags of pretrain/train.py. It reports
errors before it imports torch or DeepSpeed. The `deepspeed` command and its launcher process both import torch and
DeepSpeed before a rank reads its flags.
"""

import argparse
import socket
import sys
from collections.abc import Sequence

from pretrain.cluster.hosts.hostfile import hosts_from_flags
from pretrain.cluster.hosts.remote import LOCAL
from pretrain.cluster.launcher_flags import find_rank_command, launcher_parser, split_command_line
from pretrain.cluster.local_launch import launch_command, launch_locally
from pretrain.cluster.multihost_launch import check_outer_launcher, launch_command_on_hosts, launch_on_hosts
from pretrain.config.flags.parse import parse_arguments
from pretrain.errors import ConfigError

_MULTIHOST_FLAGS = ("master_addr", "launcher", "launcher_args", "ssh_port", "no_ssh", "node_rank", "force_multi",
                    "venv_script", "meet", "grace", "exclude_stragglers")


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the run and return its exit code. Raises ConfigError."""
    words = sys.argv[1:] if argv is None else argv
    command = find_rank_command(words)
    launcher_words, rest = (split_command_line(words) if command is None else
                            (words[:command[0]], words[command[0] + 1:]))
    parser = launcher_parser("ds-pretrain train")
    if {"-h", "--help"} & set(launcher_words):
        parser.print_help()
        print()
        parse_arguments(["--help"])
    flags = parser.parse_args(launcher_words)
    if command is None and not rest:
        raise ConfigError("command line", problem="the flags of the run are missing",
                          remedy="write for example `ds-pretrain --num_gpus RANKS --config run.yaml`; `ds-pretrain "
                                 "new run.yaml` writes this file, `ds-pretrain quickstart` trains a small model, and "
                                 "`ds-pretrain --help` lists the subcommands")
    check_outer_launcher(flags)
    forces_multihost = flags.force_multi or flags.no_ssh
    if flags.hostfile is not None and (forces_multihost or not _only_this_host(hosts_from_flags(flags))):
        return launch_on_hosts(flags, rest) if command is None else launch_command_on_hosts(flags, command[1], rest)
    for name in _MULTIHOST_FLAGS:
        if getattr(flags, name) != parser.get_default(name):
            raise ConfigError(f"--{name}", problem=f"this flag is for several hosts, but {_single_host_reason(flags)}",
                              remedy=f"remove --{name}, or give a --hostfile with several hosts")
    return launch_locally(flags, rest) if command is None else launch_command(flags, command[1], rest)


def _only_this_host(slots: dict[str, list[int]]) -> bool:
    """Return whether the run uses a single host, and this host is the one."""
    return len(slots) == 1 and next(iter(slots)) in (LOCAL, "127.0.0.1", socket.gethostname())


def _single_host_reason(flags: argparse.Namespace) -> str:
    """Return why the run uses this host alone, as the end of an error message."""
    return "there is no --hostfile" if flags.hostfile is None else f"{flags.hostfile} names only this host"
