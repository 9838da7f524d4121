"""The `ds-pretrain` command: `ds-pretrain SUBCOMMAND ...`, or `python -m pretrain SUBCOMMAND ...`.

Flags without a subcommand belong to `train`. Subcommands that run on several ranks take the launcher's flags, too:

    ds-pretrain --num_gpus 2 --config run.yaml
    ds-pretrain evaluate --num_gpus 2 runs/gpt2
    srun ds-pretrain evaluate runs/gpt2                 # another launcher starts the ranks
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # keep pretrain/ off sys.path, so that its modules shadow none of the standard library's
    if not getattr(sys.flags, "safe_path", False):  # python -P and PYTHONSAFEPATH (3.11) put no folder first
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pretrain import __version__
from pretrain.cli import run_main
from pretrain.commands import COMMANDS
from pretrain.errors import ConfigError, shorten
from pretrain.old_names import NO_COMMANDS

_USAGE = """usage: ds-pretrain [train] [flags of the launcher] [flags of the run]
       ds-pretrain SUBCOMMAND [flags] (its --help lists the flags)
"""


def program(subcommand: str = "") -> NoReturn:
    """Run the console script `ds-pretrain`, which pyproject.toml names, or the program of a subcommand in tools/."""
    sys.argv[1:1] = [subcommand] if subcommand else []
    run_main(main)


def main() -> int:
    """Run the subcommand of sys.argv and return its exit code. Raises ConfigError."""
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]  # DeepSpeed's launcher inserts it
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    words = _without_extension(words)
    first = words[0] if words else ""
    if first in ("-h", "--help", "--version"):
        print(__version__ if first == "--version" else overview())
        return 0
    if first in COMMANDS:
        words = words[1:]
    elif first and not first.startswith("-") and not first.endswith(".py"):
        raise _no_subcommand(first)
    name = first if first in COMMANDS else "train"
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("this folder", problem="it was removed", remedy="change to another one: cd FOLDER") from None
    launcher_words, rest = _split_for_launcher(name, words)
    if launcher_words:
        name, words = "train", [*launcher_words, name, *rest]
    sys.argv = [f"ds-pretrain {name}", *words]  # argparse prints the first word in usage lines
    from pretrain.distributed.process import importing

    try:
        with importing():
            function = COMMANDS[name].load()
    except ModuleNotFoundError as error:
        raise ConfigError(sys.executable, problem=f"this Python has no package {error.name!r}",
                          remedy="use the Python of the environment in which ds-pretrain is installed") from None
    try:
        return function() or 0
    except (AttributeError, ImportError, TypeError):
        from pretrain.distributed.requirements import check_requirements

        check_requirements()  # a package that is too old is the likely reason
        raise


def _no_subcommand(word: str) -> ConfigError:
    known = next((name for name, command in COMMANDS.items() if word.lower() in command.other_words.split()), "")
    if word.endswith((".yaml", ".yml")):
        remedy = f"give the settings of a run by a flag: --config {word}"
    elif known:
        remedy = f"ds-pretrain {known}: {COMMANDS[known].help}"
    else:
        remedy = NO_COMMANDS.get(word, "ds-pretrain --help lists them")
    return ConfigError("ds-pretrain", problem=f"there is no subcommand {shorten(word)!r}", remedy=remedy,
                       word="" if known or word in NO_COMMANDS else word, known=COMMANDS)


def _without_extension(words: list[str]) -> list[str]:
    """Return the words of `--extension my_module:EXTENSION SUBCOMMAND ...` with the subcommand first.

    A subcommand of an extension, and what one adds to another, is found after the extension is activated; other
    subcommands take the flag, or reject it.
    """
    word, equals, value = words[0].partition("=") if words else ("", "", "")
    specs, rest = ([value], words[1:]) if equals else ([], words[1:])
    while not equals and rest and ":" in rest[0] and not rest[0].startswith("-"):
        specs, rest = [*specs, rest[0]], rest[1:]
    if word != "--extension" or not specs or not rest or rest[0].startswith("-"):
        return words
    if rest[0] in COMMANDS and not COMMANDS[rest[0]].is_extensible:
        return [rest[0], "--extension", *specs, *rest[1:]]
    from pretrain.active_extensions import activate

    for spec in specs:
        activate(spec)
    return rest if rest[0] in COMMANDS else words


def _split_for_launcher(name: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Return (launcher's flags, other words) of a subcommand that is to be started on several ranks.

    There are no such flags for other subcommands, with --help, and in a rank that another launcher has started.
    """
    from pretrain.cluster.launcher_flags import RANK_COMMANDS, split_command_line
    from pretrain.distributed.world import world_from_environment

    if name not in RANK_COMMANDS or {"-h", "--help"} & set(words) or world_from_environment(os.environ).size > 1:
        return [], words
    return split_command_line(words)


def overview() -> str:
    """Return the text of `ds-pretrain --help`: all subcommands in their groups."""
    lines = [_USAGE]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"{group}:")
        lines += [f"  {name:<15}{command.help}" for name, command in COMMANDS.items() if command.group == group]
    return "\n".join(lines)


if __name__ == "__main__":
    program()
