"""Supervise a run: `ds-pretrain supervise [flags] -- COMMAND...`

COMMAND is any command that starts a run.
"""

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pretrain.cli import LONGEST_SECONDS, Parser, number, path_text, text, whole_number
from pretrain.cluster.hosts.remote import default_transport
from pretrain.errors import ConfigError
from pretrain.extensions.supervise.next_start import (
    SupervisorSettings,
    hostfile_of,
    hosts_of,
    launcher_host_flags,
    run_folder,
    with_separator,
)
from pretrain.extensions.supervise.supervisor import supervise
from pretrain.terminal import print_line

_DEFAULTS = {field.name: field.default for field in fields(SupervisorSettings)}
_SECONDS = number(0, LONGEST_SECONDS)
_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_restarts": (whole_number(), "give up after this many restarts in a row without a new step"),
    "min_hosts": (whole_number(1), "if at least this many hosts are healthy, start without the unhealthy ones, at the "
                                   "same global batch (default: wait for all hosts)"),
    "backoff_s": (_SECONDS, "pause in seconds before a restart; doubled for each restart without a new step"),
    "backoff_max_s": (_SECONDS, "longest pause in seconds"),
    "grace_s": (_SECONDS, "seconds that the run has to save and stop after a signal"),
    "health_command": (text, "shell command that succeeds on a healthy host "
                             "(default: import torch, and compute on each GPU)"),
    "health_timeout_s": (number(1, LONGEST_SECONDS), "seconds that the health command may take"),
}


def _print_line(line: str) -> None:
    print_line(f"supervise: {line}")


def main() -> int:
    """Return the exit code that train.py would have returned for the last start; 75 after a signal.

    Raises ConfigError.
    """
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = Parser(usage="%(prog)s [flags] -- COMMAND...",
                    description="Runs COMMAND, and restarts it after a crash or a save on a signal, but never after "
                                "the run was rejected (exit code 2). RUN/restarts.jsonl gets a row for each start.")
    parser.add_argument("--save", type=path_text, help="run folder (default: --save of COMMAND or of its YAML)")
    parser.add_argument("--hostfile", type=path_text,
                        help="hosts to check before each start (default: --hostfile of COMMAND)")
    parser.add_argument("--exclude_stragglers", action="store_true",
                        help="with --min_hosts: also leave out the hosts that the last start named as slow, for 3 "
                             "starts")
    for name, (parse, about) in _FLAGS.items():
        default = _DEFAULTS[name]
        shown = "" if "default" in about else f" (default: {default:g})"
        parser.add_argument(f"--{name}", type=parse, default=default, help=(about + shown).replace("%", "%%"))
    if end == len(words) and not {"-h", "--help"} & set(words):
        raise ConfigError("command line", problem="`--` is missing before COMMAND",
                          remedy="write `ds-pretrain supervise [flags] -- COMMAND...`")
    args, command = parser.parse_args(words[:end]), with_separator(words[end + 1:])
    if not command:
        raise ConfigError("command line", problem="COMMAND is missing",
                          remedy="write `ds-pretrain supervise [flags] -- COMMAND...`")
    hostfile = hostfile_of(command, args.hostfile)
    if hostfile is not None:
        hosts_of(command, hostfile)  # validate the hostfile before the run folder is created and locked
    settings = SupervisorSettings(command=command, run=run_folder(command, args.save), hostfile=hostfile,
                                  transport=default_transport(launcher_host_flags(command).ssh_port),
                                  exclude_stragglers=args.exclude_stragglers,
                                  **{name: getattr(args, name) for name in _FLAGS})
    return supervise(settings, _print_line)

