#!/usr/bin/env python3
"""Keep a run going: launch/supervise.py [flags] -- COMMAND..., where COMMAND is any that starts pretrain/train.py."""

import sys
from dataclasses import fields

from pretrain.cli import Parser, run_main
from pretrain.errors import ConfigError
from pretrain.resilience.hosts import reach_hosts
from pretrain.resilience.launch_command import hostfile_of, run_folder, ssh_port, with_separator
from pretrain.resilience.supervisor import Settings, supervise

_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_FLAGS = {
    "max_restarts": (int, "restarts in a row without a step beyond the last, until it gives up"),
    "min_hosts": (int, "go on with so many hosts while others are not well, at the same global batch "
                       "(default: wait for all)"),
    "backoff_s": (float, "seconds before a restart; doubled for each one without progress"),
    "backoff_max_s": (float, "longest pause, in seconds"),
    "grace_s": (float, "seconds that the run has to save and end after a signal"),
    "health_command": (str, "shell command that succeeds on a host that is well (default: torch and each GPU compute)"),
    "health_timeout_s": (float, "seconds that it may take"),
}


def _say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Exit code: the last start's, as train.py gives it; 75 after a signal. Raises ConfigError."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = Parser(prog="launch/supervise.py", usage="%(prog)s [flags] -- COMMAND...",
                    description="Runs COMMAND, and again after a signal, a hang or a crash; never after a refusal. "
                                "RUN/restarts.jsonl tells what happened.")
    parser.add_argument("--save", help="run folder (default: what COMMAND or its YAML names)")
    parser.add_argument("--hostfile", help="hosts to check before each start (default: COMMAND's own)")
    for name, (kind, text) in _FLAGS.items():
        default = _DEFAULTS[name]
        shown = "" if "default" in text else f" (default: {default:g})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=(text + shown).replace("%", "%%"))
    args, command = parser.parse_args(words[:end]), with_separator(words[end + 1:])
    if not command:
        raise ConfigError("command line", found="no command", expected="launch/supervise.py [flags] -- COMMAND...")
    for name, lowest in (("max_restarts", 0), ("min_hosts", 1), ("backoff_s", 0), ("backoff_max_s", 0), ("grace_s", 0),
                         ("health_timeout_s", 1)):
        value = getattr(args, name)
        if value is not None and not value >= lowest:
            raise ConfigError(f"--{name}", found=value, expected=f"at least {lowest}")
    settings = Settings(command=command, run=run_folder(command, args.save), reach=reach_hosts(ssh_port(command)),
                        hostfile=hostfile_of(command, args.hostfile), **{name: getattr(args, name) for name in _FLAGS})
    return supervise(settings, _say)


if __name__ == "__main__":
    run_main(main)
