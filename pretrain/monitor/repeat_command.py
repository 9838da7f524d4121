"""The command that repeats a start of a run, from its record in run.json alone. Imports no torch.

The record may be from an untrusted source. The shell executes no text of it: all text is quoted, or a comment.
"""

import json
import re
import shlex
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import printable
from pretrain.model.general.own_models import is_model_code
from pretrain.monitor.environment import RECORDED_PREFIXES

# flags that name code of the user, and what it has; the record alone never makes a program import code
OWN_CODE = {"dataset_module": "Data", "model_code": "Model"}
# set by the new command, or without effect on the result
_LEFT_OUT = (*OWN_CODE, "save", "deepspeed_config", "model", "model_overrides", "checkpoint_mirror",
             "local_rank", "resume", "resume_from", "replay")
_OF_LAUNCHER = ("CUDA_VISIBLE_DEVICES",)  # the launcher sets its own
_END = "END_OF_FILE"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def command_of(record: dict[str, Any]) -> str:
    """Return a shell script that repeats a start with the same configuration, in another run folder.

    The script writes the DeepSpeed JSON, the model's config.json and the flags into a folder next to the new run
    folder, which is its first argument. It needs the data and, if the start resumed, the checkpoint. A start of an
    older version, whose record lacks the JSON as it was given, is repeated with the JSON as it was completed.
    """
    flags = record["flags"]
    old = Path(record.get("command", {}).get("directory", "."), flags["save"])
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record["time"]))
    config = record.get("given_deepspeed_config") or record["deepspeed_config"]
    remarks = [f"Repeats the start of {old} at {when}.", *_remarks(record, old)]
    directory, more = record.get("command", {}).get("directory", "."), ""
    model = str(flags.get("model", ""))
    code = {**flags, "model_code": model if is_model_code(model) else flags.get("model_code")}
    for number, name in enumerate((name for name in OWN_CODE if code.get(name)), start=2):
        remarks.append(f"{OWN_CODE[name]}: --{name} {code[name]}, your own code in {directory} or on PYTHONPATH: give "
                       f"it after {'the run folder' if number == 2 else 'the other one'}.")
        more += f' --{name} "${{{number}:?the {name} that the first lines name}}"'
    return "\n".join([
        "#!/bin/sh", *(f"# {printable(line)}" for line in remarks), "set -e",
        f"default={shlex.quote(f'{old}-repeat')}", 'run=$(realpath -m -- "${1:-$default}")',
        'files="$run-files"', 'mkdir -p -- "$files"',
        _file("deepspeed.json", config), _file("config.json", record["model_config"]),
        _file("run.yaml", repeated_flags(record)),  # JSON is YAML
        *_launch(record, more)
    ]) + "\n"


def _remarks(record: dict[str, Any], old: Path) -> list[str]:
    """Return what has to be the same, a line each."""
    code, versions = record.get("code") or {}, record.get("versions", {})
    changes = f", with the changes in {old / code['diff']}" if code.get("diff") else ""
    return [f"Code: commit {record.get('git_commit') or 'not known'}{changes}.",
            "Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
            "Hosts: " + "; ".join(f"{host['host']}: {host['ranks']} ranks, {_devices(host)}"
                                    for host in record.get("hardware", [])) + "."]


def _devices(host: dict[str, Any]) -> str:
    names = [gpu["name"] for gpu in host["gpus"]]
    return f"{len(names)} x {names[0]}" if names else f"{host['cores']} cores of {host['cpu']}"


def repeated_flags(record: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that differ from their defaults, and the checkpoint that the start continued from."""
    flags = record["flags"]
    given = {f.name: flags[f.name] for f in fields(RunArguments)
             if f.name not in _LEFT_OUT and flags.get(f.name) not in (None, False, f.default)}
    if record.get("resumed_from"):
        given.pop("init_from", None)
        given["resume_from"] = record["resumed_from"]
    elif not record.get("first_step"):
        given.pop("override", None)
    return given


def repeated_variables(record: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of a start that change results or speed, without those of the launcher."""
    return {name: value for name, value in record.get("environment", {}).items()
            if name not in _OF_LAUNCHER and _VARIABLE.fullmatch(name) and name.startswith(RECORDED_PREFIXES)}


def _file(name: str, values: dict[str, Any]) -> str:
    """Return the shell command that writes a JSON file."""
    return f"cat > \"$files/{name}\" <<'{_END}'\n{json.dumps(values, indent=1)}\n{_END}"


def _launch(record: dict[str, Any], more: str) -> list[str]:
    """Return the lines that set the environment and start the ranks. `more`: further flags."""
    variables = [f"export {name}={shlex.quote(value)}" for name, value in repeated_variables(record).items()]
    hosts, ranks = record.get("hardware", []), int(record["layout"]["world_size"])
    slots = shlex.join(f"{host['host']} slots={host['ranks']}" for host in hosts)
    hostfile = [f"printf '%s\\n' {slots} > \"$files/hostfile\""] if len(hosts) > 1 else []
    where = '--hostfile "$files/hostfile"' if hostfile else f"--num_accelerators {ranks}"
    directory = record.get("command", {}).get("directory", ".")
    return [*variables, *hostfile, f"cd -- {shlex.quote(directory)}",
            f'exec ds-pretrain {where} --config "$files/run.yaml" --deepspeed_config "$files/deepspeed.json" '
            f'--model "$files/config.json" --save "$run"{more}']
