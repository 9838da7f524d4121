"""Print a script with which bash or zsh completes subcommands, flags and values.

    ds-pretrain completion bash > ~/.local/share/bash-completion/completions/ds-pretrain
    ds-pretrain completion zsh > FOLDER/_ds-pretrain     # a FOLDER of $fpath
"""

import argparse
import copy
from collections.abc import Iterable

import shtab

from pretrain.cli import Parser, new_prefix, path, path_text, prefix
from pretrain.commands import COMMANDS
from pretrain.commands.reference import all_parsers
from pretrain.config.flags.arguments import FLAGS
from pretrain.memory.hardware import GPUS
from pretrain.model.config import preset_names
from pretrain.remote import path_or_url
from pretrain.shipped import TEMPLATES, layout_names

_SHELLS = ("bash", "zsh")


def main() -> None:
    """Print the script."""
    parser = Parser(description="Print a script that completes subcommands, flags and values in a shell.",
                    epilog="For bash, write it to ~/.local/share/bash-completion/completions/ds-pretrain; for zsh, to "
                           "_ds-pretrain in a folder of $fpath.")
    parser.add_argument("shell", choices=_SHELLS, help="bash or zsh")
    shell = parser.parse_args().shell
    functions = "\n".join(_function(shell, name, words) for name, words in _NAMES_OR_FILES.items())
    print(shtab.complete(_complete_parser(), shell, preamble=functions))


# destination of a flag -> names that complete its value, besides files
_NAMES_OR_FILES = {"deepspeed_config": layout_names(), "model": preset_names()}
# flag, or subcommand with an argument -> its values
_NAMES = {"config": layout_names(), "template": list(TEMPLATES), "--gpu": list(GPUS)}


def _function(shell: str, name: str, words: Iterable[str]) -> str:
    """Return a shell function that completes names and files."""
    listed = " ".join(words)
    body = (f'compgen -W "{listed}" -- "$1"; compgen -f -- "$1"' if shell == "bash" else
            f"_alternative 'names:name:({listed})' 'files:file:_files'")
    return f"_ds_pretrain_{name}_or_file() {{ {body}; }}"


def _complete_parser() -> argparse.ArgumentParser:
    """Return one parser of the complete command line: flags of `train`, and all subcommands."""
    root = argparse.ArgumentParser("ds-pretrain", add_help=False)
    parsers = all_parsers()
    _copy_actions(parsers["train"], root, "train")
    subcommands = root.add_subparsers()
    for name, own in parsers.items():
        child = subcommands.add_parser(name, help=COMMANDS[name].help, add_help=False)
        _copy_actions(own, child, name)
    return root


def _copy_actions(parsers: Iterable[argparse.ArgumentParser], target: argparse.ArgumentParser, command: str) -> None:
    """Add the flags and arguments of the parsers to the target, with what completes their values."""
    for action in (action for parser in parsers for action in parser._actions):
        if isinstance(action, argparse._SubParsersAction):
            nested = target.add_subparsers()
            for name, parser in action.choices.items():
                _copy_actions([parser], nested.add_parser(name, help=parser.description, add_help=False), command)
            continue
        new, named = copy.copy(action), action.option_strings[0] if action.option_strings else command
        new.option_strings = [word for word in action.option_strings if word not in target._option_string_actions]
        if action.help == argparse.SUPPRESS or (action.option_strings and not new.option_strings):
            continue
        if action.option_strings and action.dest in _NAMES_OR_FILES:
            new.complete = dict.fromkeys(_SHELLS, f"_ds_pretrain_{action.dest}_or_file")  # type: ignore[attr-defined]
        elif _is_path(action):
            new.complete = shtab.FILE  # type: ignore[attr-defined]
        elif named in _NAMES:
            new.choices = _NAMES[named]
        elif action.dest in FLAGS and FLAGS[action.dest].choices:
            new.choices = FLAGS[action.dest].choices
        target._add_action(new)


def _is_path(action: argparse.Action) -> bool:
    """Return whether files complete the value. After a flag that takes several words, they would hide further flags."""
    several = action.option_strings and action.nargs in ("+", "*")
    return not several and (action.type in (path, path_text, path_or_url, prefix, new_prefix) or
                            action.metavar == "FILE")
