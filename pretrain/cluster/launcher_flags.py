"""Flags of `ds-pretrain` and launch/cluster.sh: most flags of `deepspeed`, and --check_only, --meet and --grace.

A command line has this form:

    [flags of the launcher] [pretrain/train.py | --] FLAGS OF THE RUN
    [flags of the launcher] SUBCOMMAND FLAGS OF THE SUBCOMMAND, with `ds-pretrain`
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from pretrain.active_extensions import for_each_extension
from pretrain.cli import LONGEST_SECONDS, Parser, number, whole_number

_PORT, _COUNT = whole_number(1, 65535), whole_number(1, 100_000)
_SECONDS = number(0, LONGEST_SECONDS)
# Choice of --launcher -> the program that must be installed (DeepSpeed checks for the same one)
LAUNCHER_PROGRAMS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mpich": "mpirun", "slurm": "srun"}
RANK_COMMANDS = {"evaluate"}  # subcommands that run on one or several ranks
for_each_extension(lambda extension: RANK_COMMANDS.update(
    name for name, command in extension.commands.items() if command.runs_on_ranks))
DEFAULT_HOSTFILE = "/job/hostfile"  # DeepSpeed's default; without --hostfile this file is used if it exists


def launcher_parser(program: str) -> Parser:
    """Return the parser of the launcher's flags. `program`: name of the command in `--help` and in errors."""
    parser = Parser(prog=program, usage="%(prog)s [flags] [--] FLAGS OF THE RUN",
                    description="Validate a run, then train on this host or on the hosts of --hostfile. All hosts must "
                                "share the environment, the data and the run folder.",
                    epilog="All other flags belong to the run; they are listed below.")
    add_host_flags(parser)
    add = parser.add_argument
    add("--master_port", type=_PORT,
        help="free port on the first host (default on one host: MASTER_PORT or any free port; on several hosts: 29500)")
    add("--launcher", choices=sorted(LAUNCHER_PROGRAMS), default="pdsh",
        help="program that starts the ranks on all hosts (default: %(default)s)")
    add("--launcher_args", default="", help="more flags for the --launcher program, as one quoted string")
    add("--force_multi", action="store_true", help="use --launcher even if the hostfile has a single host")
    add("--no_ssh", action="store_true",
        help="use no ssh: you run this command on every host, each time with another --node_rank; the commands connect "
             "to each other at --master_addr, port --master_port + 1")
    add("--node_rank", type=whole_number(), default=-1,
        help="with --no_ssh: index of this host in the hostfile, from 0 (default: the rank, if srun or mpirun starts "
             "this command once on each host)")
    add("--meet", type=_SECONDS, default=60,
        help="with --no_ssh: seconds to wait for this command on the other hosts (default: %(default)s)")
    add("--grace", type=_SECONDS, default=30,
        help="seconds from the failure of one host until the ranks on the other hosts are killed "
             "(default: %(default)s)")
    add("--check_only", action="store_true", help="validate the run and its hosts, but do not start it")
    add = parser.add_argument_group("passed on to `deepspeed`").add_argument
    add("--venv_script", help="script that activates the Python environment on each host")
    add("--enable_each_rank_log", help="folder for one log file per rank")
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to cores of its own")
    add("--bind_core_list", help="cores for --bind_cores_to_rank, such as 0-3,8 (default: all)")
    add("--log_level", choices=("debug", "info", "warning", "error", "critical"),
        help="log level of DeepSpeed's launcher (default: critical on one host, warning on several)")
    add("--quiet", "-q", dest="log_level", action="store_const", const="error", help="same as --log_level error")
    return parser


def host_flags(words: Sequence[str]) -> argparse.Namespace:
    """Return the flags that choose hosts, out of the flags of any launcher. Raises ConfigError for a wrong value."""
    parser = Parser(add_help=False)
    add_host_flags(parser)
    return parser.parse_known_args(words)[0]


def add_host_flags(parser: Parser) -> None:
    """Add the flags that choose hosts."""
    hosts = parser.add_argument_group("which hosts, and how many ranks")
    hosts.add_argument("--hostfile", "-H", default=DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None,
                       help="file with a line `NAME slots=RANKS` for each host; rank 0 runs on the first host "
                            f"(default: {DEFAULT_HOSTFILE}, if it exists)")
    hosts.add_argument("--include", "-i", default="", help="HOST[:SLOT,SLOT][@HOST...]: use only these hosts or slots")
    hosts.add_argument("--exclude", "-e", default="",
                       help="HOST[:SLOT,SLOT][@HOST...]: use all hosts and slots but these")
    hosts.add_argument("--exclude_stragglers", action="store_true",
                       help="leave out the hosts that the last start of the run named as slow, for 3 starts, at the "
                            "same global batch")
    hosts.add_argument("--num_nodes", type=_COUNT, default=-1, help="use only the first N hosts")
    hosts.add_argument("--num_gpus", "--num_accelerators", type=_COUNT, default=-1,
                       help="ranks on each host, one per GPU (default: one per slot; without a hostfile one per GPU, "
                            "or one per NUMA node if there is no GPU)")
    hosts.add_argument("--master_addr", default="",
                       help="address of the first host (default: its address on the network to the other hosts)")
    hosts.add_argument("--ssh_port", type=_PORT, help="ssh port of every host")


def find_rank_command(words: Sequence[str]) -> tuple[int, str] | None:
    """Return index and name of the subcommand in `[flags of the launcher] SUBCOMMAND FLAGS`; None if there is none.

    The file evaluate.py of tools/ stands for its subcommand.
    """
    parser, index = launcher_parser(""), 0
    while index < len(words):
        takes_value = parser.takes_value(words[index])
        if takes_value is None:
            name = "evaluate" if Path(words[index]).name == "evaluate.py" else words[index]
            return (index, name) if name in RANK_COMMANDS else None
        index += 2 if takes_value else 1
    return None


def split_command_line(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into (launcher's flags, train.py's flags).

    `--`, `train.py` or `-- train.py` separates the two parts. Without a separator, the launcher's flags are recognized
    by name.
    """
    parser, rest = launcher_parser(""), list(words)
    separator = _find_separator(words, parser)
    if separator is not None:
        rest = rest[separator + 1:]
        return list(words[:separator]), rest[1:] if rest and Path(rest[0]).name == "train.py" else rest
    launcher: list[str] = []
    train: list[str] = []
    while rest:
        word = rest.pop(0)
        takes_value = parser.takes_value(word)
        (train if takes_value is None else launcher).append(word)
        if takes_value and rest:
            launcher.append(rest.pop(0))
    return launcher, train


def _find_separator(words: Sequence[str], parser: Parser) -> int | None:
    """Return the index of the first `--` or train.py that is not the value of a flag, or None."""
    index = 0
    while index < len(words):
        previous = words[index - 1] if index > 0 else ""
        may_be_value = previous.startswith("-") and parser.takes_value(previous) is not False
        if words[index] == "--" or (Path(words[index]).name == "train.py" and not may_be_value):
            return index
        index += 2 if parser.takes_value(words[index]) else 1
    return None
