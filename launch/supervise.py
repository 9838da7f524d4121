#!/usr/bin/env python3
"""Keep a run going: launch/supervise.py [flags] -- COMMAND..., where COMMAND is any that starts pretrain/train.py."""

import sys
from dataclasses import fields

from pretrain.cli import LONGEST_SECONDS, Parser, number, place, run_main, text, whole_number
from pretrain.cluster.supervise.host_checks import reach_hosts
from pretrain.cluster.supervise.launch_command import hostfile_of, hosts_of, run_folder, ssh_port, with_separator
from pretrain.cluster.supervise.supervisor import Settings, supervise
from pretrain.errors import ConfigError

_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_SECONDS = number(0, LONGEST_SECONDS)
_FLAGS = {
    "max_restarts": (whole_number(), "restarts in a row without a step beyond the last, until it gives up"),
    "min_hosts": (whole_number(1), "continue with N healthy hosts while others are not, at the same global batch "
                                   "(default: wait for all)"),
    "backoff_s": (_SECONDS, "seconds before a restart; doubled for each one without progress"),
    "backoff_max_s": (_SECONDS, "longest pause, in seconds"),
    "grace_s": (_SECONDS, "seconds that the run has to save and end after a signal"),
    "health_command": (text, "shell command that succeeds on a healthy host "
                             "(default: torch and each GPU compute)"),
    "health_timeout_s": (number(1, LONGEST_SECONDS), "seconds that it may take"),
}


def _say(line: str) -> None:
    print(f"supervise: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Exit code: the last start's, as train.py gives it; 75 after a signal. Raises ConfigError."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = Parser(prog="launch/supervise.py", usage="%(prog)s [flags] -- COMMAND...",
                    description="Runs COMMAND, and again after a signal, a hang or a crash; never after a refusal. "
                                "RUN/restarts.jsonl tells what happened.")
    parser.add_argument("--save", type=place, help="run folder (default: what COMMAND or its YAML names)")
    parser.add_argument("--hostfile", type=place, help="hosts to check before each start (default: COMMAND's own)")
    for name, (kind, about) in _FLAGS.items():
        default = _DEFAULTS[name]
        shown = "" if "default" in about else f" (default: {default:g})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=(about + shown).replace("%", "%%"))
    args, command = parser.parse_args(words[:end]), with_separator(words[end + 1:])
    if not command:
        raise ConfigError("command line", found="no command", expected="launch/supervise.py [flags] -- COMMAND...")
    hostfile = hostfile_of(command, args.hostfile)
    if hostfile is not None:
        hosts_of(command, hostfile)  # before the run folder is made and locked
    settings = Settings(command=command, run=run_folder(command, args.save), reach=reach_hosts(ssh_port(command)),
                        hostfile=hostfile, **{name: getattr(args, name) for name in _FLAGS})
    return supervise(settings, _say)


if __name__ == "__main__":
    run_main(main)
