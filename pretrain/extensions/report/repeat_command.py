"""The command that repeats a start of a run, from its record in run.json alone. Imports no torch.

The record may be from an untrusted source. The shell executes no text of it: all text is quoted, or a comment. The
script has only what `repeatable.py` allows, and lists the rest in comments.
"""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from pretrain.errors import printable, shorten
from pretrain.model.own_models import is_model_code
from pretrain.monitor.repeatable import (
    OWN_CODE,
    directory_of,
    hosts_of,
    left_out_blocks,
    left_out_flags,
    repeated_config,
    repeated_flags,
    repeated_variables,
    why_left_out,
)

_END = "END_OF_FILE"


def command_of(record: dict[str, Any], run: Path) -> str:
    """Return a shell script that repeats a start of `run` with the same configuration, in another run folder.

    The script writes the DeepSpeed JSON, the model's config.json and the flags into a folder next to the new run
    folder, which is its first argument. It needs the data and, if the start resumed, the checkpoint; for several hosts,
    the variable HOSTFILE, too.
    """
    flags, directory, more = record["flags"], directory_of(record), ""
    old = directory / flags["save"]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record["time"]))
    remarks = [f"Repeats the start of {old} at {when}.", *_remarks(record, old), *_left_out(record)]
    model = str(flags.get("model", ""))
    code = {**flags, "model_code": model if is_model_code(model) else flags.get("model_code")}
    for number, name in enumerate((name for name in OWN_CODE if code.get(name)), start=2):
        remarks.append(f"{OWN_CODE[name]}: --{name} {code[name]}, your own code: run this script in its folder "
                       f"({directory}), and give it after {'the run folder' if number == 2 else 'the other one'}.")
        more += f' --{name} "${{{number}:?the {name} that the first lines name}}"'
    return "\n".join([
        "#!/bin/sh", *(f"# {printable(line)}" for line in remarks), "set -e",
        f"default={shlex.quote(f'{run.absolute()}-repeat')}", 'run=$(realpath -m -- "${1:-$default}")',
        'files="$run-files"', 'mkdir -p -- "$files"',
        _file("deepspeed.json", repeated_config(record)), _file("config.json", record["model_config"]),
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


def _left_out(record: dict[str, Any]) -> list[str]:
    """Return what is not repeated, a line each."""
    flags = [f"Left out: --{name} {shorten(json.dumps(value), 300)} ({why_left_out(name)}); add it if you want it."
             for name, value in left_out_flags(record).items()]
    blocks = left_out_blocks(record)
    return [*flags, *([f"Left out of the DeepSpeed JSON: {', '.join(blocks)}."] if blocks else [])]


def _file(name: str, values: dict[str, Any]) -> str:
    """Return the shell command that writes a JSON file."""
    return f"cat > \"$files/{name}\" <<'{_END}'\n{json.dumps(values, indent=1)}\n{_END}"


def _launch(record: dict[str, Any], more: str) -> list[str]:
    """Return the lines that set the environment and start the ranks. `more`: further flags."""
    variables = [f"export {name}={shlex.quote(value)}" for name, value in repeated_variables(record).items()]
    ranks, hosts = int(record["layout"]["world_size"]), hosts_of(record)
    where = f"--num_accelerators {ranks}"
    if len(hosts) > 1:  # a record alone never makes a program connect to hosts
        where = '--hostfile "${HOSTFILE:?it names a hostfile for the hosts that the first lines name}"'
    return [*variables,
            f'exec ds-pretrain {where} --config "$files/run.yaml" --deepspeed_config "$files/deepspeed.json" '
            f'--model "$files/config.json" --save "$run"{more}']
