"""The line `next: ds-pretrain ...` at the end of a command, with the paths of the user."""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from pretrain.active_extensions import advice_on
from pretrain.config.flags.parse import read_yaml
from pretrain.errors import ConfigError
from pretrain.memory.hardware import MAX_GPUS_PER_NODE
from pretrain.stored_json import read_settings

LISTED = "#   "  # beginning of a command in the first lines of a YAML that lists the commands of its run


def after_tokenizer(inputs: Sequence[str], folder: Path, options: Sequence[str]) -> str:
    """Return the command that prepares the text on which a tokenizer was trained."""
    return _command("prepare", *inputs, "--tokenizer", str(folder), "--out", str(folder.parent / "tokens"), *options)


def after_prepare(prefix: str) -> str:
    """Return the command that follows in the list of the YAML that names the token files, or what extensions advise.

    The YAML is searched in this folder, and in the one above the folders of the token files.
    """
    folders = dict.fromkeys((Path(), *Path(prefix).parents[2:3]))
    for path in (path for folder in folders for path in sorted(folder.glob("*.y*ml"))):
        try:
            _, named = read_yaml(str(path)).get("train_data", (0, ""))
        except ConfigError:  # a YAML of another program
            continue
        if named == prefix and (command := _listed_after("prepare", path)):
            return command
    return _advised("prepared", prefix)


def after_shard(prefix: str) -> str:
    """Return the command that follows when all shards are prepared; "" if no extension has one."""
    return _advised("shards", prefix)


def _advised(situation: str, prefix: str) -> str:
    return next((command.replace("{out}", shlex.quote(prefix)) for command in advice_on(situation)), "")


def before_check(words: Sequence[str], prefix: str) -> str:
    """Return the command that prepares the token files `prefix`, if the YAML lists it and they do not exist."""
    if len(words) == 2 and words[0] == "--config" and not Path(f"{prefix}.idx").exists():
        first = next(iter(_listed(Path(words[1]))), "")
        return first if first.startswith("ds-pretrain prepare ") else ""
    return ""


def after_check(words: Sequence[str], *, world_size: int, device: str) -> str:
    """Return the command that trains the run with these flags: from its YAML, or for the launcher."""
    if len(words) == 2 and words[0] == "--config" and (command := _listed_after("check", Path(words[1]))):
        return command
    if world_size > MAX_GPUS_PER_NODE:
        return _command("--hostfile", "HOSTS", *words)
    return _command("--num_accelerators" if device == "cpu" else "--num_gpus", str(world_size), *words)


def _listed_after(subcommand: str, path: Path) -> str:
    """Return the command that follows a subcommand in the list at the top of a YAML; "" if there is none."""
    for command, following in itertools.pairwise(_listed(path)):
        if command.startswith(f"ds-pretrain {subcommand} "):
            return following
    return ""


def _listed(path: Path) -> list[str]:
    lines = read_settings(path).splitlines()
    return [line.removeprefix(LISTED) for line in lines if line.startswith(f"{LISTED}ds-pretrain ")]


def _command(*words: str) -> str:
    return shlex.join(["ds-pretrain", *words])
