"""Flags of `ds-pretrain` and launch/cluster.sh: most of those of `deepspeed`, and a few more.

    [flags of the launcher] [pretrain/train.py | --] FLAGS OF pretrain/train.py
"""

from collections.abc import Sequence
from pathlib import Path

from pretrain.cli import LONGEST_SECONDS, Parser, number, whole_number

_PORT, _COUNT = whole_number(1, 65535), whole_number(1, 100_000)
_SECONDS = number(0, LONGEST_SECONDS)
LAUNCHERS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mpich": "mpirun", "slurm": "srun"}  # what DeepSpeed looks for
NO_HOSTFILE = "/job/hostfile"  # DeepSpeed's default: only where it exists do other hosts take part


def command_line(program: str) -> Parser:
    """Parser of the launcher's flags."""
    parser = Parser(prog=program, usage="%(prog)s [flags] [pretrain/train.py] FLAGS OF pretrain/train.py",
                    description="Check a run, then train on this host, or on those of --hostfile, which share this "
                                "checkout, the data and the run folder.",
                    epilog="All other flags are pretrain/train.py's: python -m pretrain.train --help lists them.")
    _add_hosts(parser)
    add = parser.add_argument
    add("--master_addr", default="", help="address of the first host (default: on the interface to the others)")
    add("--master_port", type=_PORT, help="a free port there (default: on one host MASTER_PORT or any, on several "
                                          "29500)")
    add("--launcher", choices=sorted(LAUNCHERS), default="pdsh", help="for other hosts' ranks (default: %(default)s)")
    add("--launcher_args", default="", help="more flags for the launcher, in one pair of quotes")
    add("--ssh_port", type=_PORT, help="of every host")
    add("--force_multi", action="store_true", help="reach a single host through --launcher too")
    add("--no_ssh", action="store_true", help="run this command on every host, each with its --node_rank; they meet "
                                              "at --master_addr, port --master_port + 1")
    add("--node_rank", type=whole_number(), default=-1, help="with --no_ssh: this host's place in the hostfile, from 0")
    add("--meet", type=_SECONDS, default=60, help="with --no_ssh: seconds for the other hosts' launchers to come "
                                               "(default: %(default)s)")
    add("--grace", type=_SECONDS, default=30, help="seconds from a host's failure until the others are ended "
                                                "(default: %(default)s)")
    add("--check_only", action="store_true", help="check the run and its hosts, and start nothing")
    passed = parser.add_argument_group("passed on to `deepspeed`")
    for flag in ("--venv_script", "--enable_each_rank_log", "--bind_core_list"):
        passed.add_argument(flag)
    passed.add_argument("--log_level", choices=("debug", "info", "warning", "error", "critical"),
                        help="of DeepSpeed's launcher (default: critical on one host, warning on several)")
    passed.add_argument("--quiet", "-q", dest="log_level", action="store_const", const="error")
    passed.add_argument("--bind_cores_to_rank", action="store_true")
    return parser


def _add_hosts(parser: Parser) -> None:
    hosts = parser.add_argument_group("which hosts, and how many ranks")
    hosts.add_argument("--hostfile", "-H", help="a line `NAME slots=RANKS` for each host; rank 0 is on the first")
    hosts.add_argument("--include", "-i", default="", help="HOST[:SLOT,SLOT][@HOST...]: only these of the hostfile")
    hosts.add_argument("--exclude", "-e", default="", help="HOST[:SLOT,SLOT][@HOST...]: all but these")
    hosts.add_argument("--num_nodes", type=_COUNT, default=-1, help="use the first N hosts")
    hosts.add_argument("--num_gpus", "--num_accelerators", type=_COUNT, default=-1,
                       help="ranks on each host, one a GPU (default: all slots; without a hostfile one on each GPU, "
                            "or on each NUMA node of CPUs)")


def _separator(words: Sequence[str], parser: Parser) -> int | None:
    """Where the first `--` or train.py stands that is no flag's value; None where there is none."""
    at = 0
    while at < len(words):
        may_be_value = at > 0 and words[at - 1].startswith("-") and parser.takes_value(words[at - 1]) is not False
        if words[at] == "--" or (Path(words[at]).name == "train.py" and not may_be_value):
            return at
        at += 2 if parser.takes_value(words[at]) else 1
    return None


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(launcher's flags, train.py's flags).

    `--` or train.py separates the two. Without either, the launcher's flags are known by their names.
    """
    parser, rest = command_line(""), list(words)
    end = _separator(words, parser)
    if end is not None:
        rest = rest[end + 1:]
        return list(words[:end]), rest[1:] if rest and Path(rest[0]).name == "train.py" else rest
    launcher: list[str] = []
    train: list[str] = []
    while rest:
        word = rest.pop(0)
        takes_value = parser.takes_value(word)
        (train if takes_value is None else launcher).append(word)
        if takes_value and rest:
            launcher.append(rest.pop(0))
    return launcher, train
