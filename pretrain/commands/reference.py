"""Print a reference as Markdown, from the code that defines it: flags, JSON keys, metrics, events ...

The site of the documentation has the same tables (.github/site/hooks.py). Completion in shells uses the parsers.
"""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.cli import Parser
from pretrain.cluster.launcher_flags import RANK_COMMANDS, launcher_parser
from pretrain.commands import COMMANDS
from pretrain.config.ds_json.check_keys import expected_value
from pretrain.config.ds_json.optimizers import KNOWN_NAMES, SCHEDULERS, optimizer_params
from pretrain.config.ds_json.schema import REMOVED, TREE, Key, Tree
from pretrain.config.flags.arguments import OVERRIDES
from pretrain.config.flags.parse import run_parser
from pretrain.errors import EXIT_CODES
from pretrain.extension import Extension
from pretrain.monitor.rows import EVALUATION_ROW, EVENTS, OPTIONAL_KEYS, TRAINING_ROW

_KEPT = ("PATH", "HOME", "COLUMNS", "LANG")  # environment variables


class _FoundError(BaseException):
    """Carries the parser out of a program before it runs."""


def parser_of(main: Callable[[], Any], words: list[str]) -> tuple[Parser, bool]:
    """Return the parser that a program makes for its command line, and whether the run's flags may follow.

    The program runs until it parses the words.
    """
    with _without_parsing(words):
        try:
            main()
        except _FoundError as found:
            return found.args[0], found.args[1]
    raise AssertionError("the program has no parser")


@contextmanager
def _without_parsing(words: list[str]) -> Iterator[None]:
    def instead(parser: Parser, passes_on: bool) -> NoReturn:
        raise _FoundError(parser, passes_on)

    argv, environment = sys.argv, dict(os.environ)
    sys.argv, Parser.instead = words, instead
    for name in (name for name in environment if name not in _KEPT):  # programs of several ranks read RANK ... first
        del os.environ[name]
    try:
        yield
    finally:
        sys.argv, Parser.instead = argv, None
        os.environ.clear()  # some programs export RANK, which would turn later processes into ranks
        os.environ.update(environment)


def all_parsers() -> dict[str, list[argparse.ArgumentParser]]:
    """Return the parsers of each subcommand: its own; of the launcher and of a run if it takes their flags."""
    found: dict[str, list[argparse.ArgumentParser]] = {"train": [launcher_parser("ds-pretrain train"), run_parser()]}
    for name, command in COMMANDS.items():
        if name not in found:
            parser, takes_run = parser_of(command.load(), [f"ds-pretrain {name}", "--", "true"])
            launcher = [launcher_parser("")] if name in RANK_COMMANDS else []
            found[name] = [parser, *launcher, *([run_parser()] if takes_run else [])]
    return {name: found[name] for name in COMMANDS}


_KEY_HEADER = ("key", "value, or why it is rejected or has no effect")
_FIELD = re.compile(r"^    (\w+): (.+?)(?: = (.+?))?(?:  # (.+))?$", re.MULTILINE)  # of a dataclass, with its comment
_CODE = re.compile(r"(?<![\w-])(--\w+|\"[^\" ]+\")(?!\w)")  # flags, and words in quotation marks


def main() -> None:
    """Print the table of one topic."""
    parser = Parser(description="Print a reference as Markdown tables, from the code that defines it.")
    parser.add_argument("topic", choices=tuple(TOPICS), metavar="TOPIC",
                        help="; ".join(f"{name}: {title}" for name, (title, _) in TOPICS.items()))
    title, text = TOPICS[parser.parse_args().topic]
    print(f"# {title}\n\n{text()}")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. Code may contain `|`, other text has it escaped."""
    lines = [list(header), ["---"] * len(list(header)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """Return a help text as Markdown, with flags and quoted words as code. What is code already remains."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _CODE.sub(r"`\1`", re.sub(r"([*<|])", r"\\\1", part))
                   for part in parts)


def _flagstable(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> str:
    """Return a table of flags and of arguments without flags."""
    formatter = parser._get_formatter()
    rows = []
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        value = "" if action.nargs == 0 else formatter._format_args(
            action, formatter._get_default_metavar_for_optional(action))
        names = ", ".join(map(code, action.option_strings)) or code(str(action.metavar or action.dest))
        rows.append([names, code(value) if action.option_strings else "",
                     prose(formatter._expand_help(action)) if action.help else ""])
    return table(["flag", "value", "meaning"], rows) if rows else ""


def _run_flags() -> str:
    """Return the flags of a run in their groups."""
    parser = run_parser()
    parts = ["Each flag is also a key of the YAML file that `--config` names.\n"]
    for group in parser._action_groups:
        if group._group_actions and group.title != "help":
            parts += [f"## {str(group.title).capitalize()}\n", *([f"{prose(group.description)}\n"] if group.description
                                                               else []),
                      _flagstable(parser, group._group_actions)]
    parts += ["## Names of --override\n",
              table(["name", "settings"], ((code(name), settings) for name, settings in OVERRIDES.items()))]
    return "\n".join(parts)


def _commands() -> str:
    """Return all subcommands with their flags, except the flags of a run."""
    parts = []
    for name, (own, *further) in all_parsers().items():
        also = ["those of the launcher (`ds-pretrain train`)"] if name in RANK_COMMANDS else []
        also += ["those of a run (`ds-pretrain reference flags`)"] if run_parser() in further else []
        parts += [f"## ds-pretrain {name}\n", f"{COMMANDS[name].help[0].upper()}{COMMANDS[name].help[1:]}.\n",
                  _flagstable(own, own._actions), f"Further flags: {' and '.join(also)}.\n" if also else ""]
        for action in own._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, parser in action.choices.items():
                    parts += [f"### ds-pretrain {name} {word}\n", f"{prose(parser.description or '')}\n",
                              _flagstable(parser, parser._actions)]
    return "\n".join(part for part in parts if part)


def _json_keys() -> str:
    """Return all keys of a DeepSpeed JSON: legal values, or why a key is rejected or has no effect."""
    top_level: Tree = {name: key for name, key in TREE.items() if isinstance(key, Key)}
    parts = ["All keys that are neither rejected nor without effect are passed on to DeepSpeed.\n",
             "## Top level\n", table(_KEY_HEADER, _rows_of(top_level, ""))]
    for name, key in TREE.items():
        if not isinstance(key, Key):
            parts += [f"## {name}\n", table(_KEY_HEADER, _rows_of(key, f"{name}."))]
    for block, kinds in (("optimizer", {kind: optimizer_params(kind) or {} for kind in KNOWN_NAMES}),
                         ("scheduler", SCHEDULERS)):
        owners: dict[tuple[str, str], list[str]] = {}
        for kind, params in kinds.items():
            for row in _rows_of(params, f"{block}.params."):
                owners.setdefault(row, []).append(kind)
        parts += [f"## {block}.params\n",
                  table([*_KEY_HEADER, "types"], ((*row, ", ".join(names)) for row, names in owners.items()))]
    parts += ["## Keys that DeepSpeed has removed\n",
              table(["key", "reason"], ((code(name), prose(reason)) for name, reason in REMOVED.items()))]
    return "\n".join(parts)


def _rows_of(tree: Tree, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a block with its values, or with what happens to it."""
    for name, key in tree.items():
        if not isinstance(key, Key):
            yield from _rows_of(key, f"{prefix}{name}.")
        else:
            outcome = f"rejected: {key.rejected}" if key.rejected else key.ignored
            yield code(prefix + name), prose(outcome or expected_value(key))


def _metrics() -> str:
    def rows(keys: Mapping[str, tuple[str, str]]) -> str:
        return table(["key", "unit", "definition"], ((code(key), *texts) for key, texts in keys.items()))

    return "\n".join((
        'A row of `RUN/metrics.jsonl` is of a logged step or of an evaluation. "Over the steps" means over all steps '
        "since the last row; means and maxima over ranks are over all ranks of the run.\n",
        "## Rows of training\n", rows(TRAINING_ROW),
        "## Keys that exist with some flags and models only\n", rows(OPTIONAL_KEYS),
        "## Rows of evaluations\n", rows(EVALUATION_ROW),
        *(f"## {title}\n\n{rows(keys)}" for each in extensions() for title, keys in each.rows.items())))


def _events() -> str:
    return "Each row of `RUN/events.jsonl` has `time`, `event`, `step` and `reason`.\n\n" + table(
        ["event", "further keys", "meaning"],
        ((code(name), ", ".join(map(code, keys.split())), meaning) for name, (keys, meaning) in EVENTS.items()))


def _exit_codes() -> str:
    return table(["exit code", "meaning"], ((str(code), meaning) for code, meaning in EXIT_CODES.items()))


def _manifest() -> str:
    """Return the fields of a checkpoint's manifest, with the comments of their declarations."""
    fields = _FIELD.findall(inspect.getsource(Manifest).partition("@property")[0])
    return "`manifest.json` of a checkpoint has these keys, and `sha256`, the hash of all others.\n\n" + table(
        ["key", "type", "meaning"],
        ((code(name), code(re.sub(r"^Annotated\[(.+), (\w+)\]", r"\2", kind).lstrip("_")), prose(comment))
         for name, kind, _, comment in fields))


def _of_extension(extension: Extension, function: str) -> str:
    return str(extension.load(function)())


# topic -> (title, function that returns the Markdown below the title)
TOPICS: dict[str, tuple[str, Callable[[], Any]]] = {
    "commands": ("Subcommands and their flags", _commands),
    "flags": ("Flags of a run", _run_flags),
    "json": ("Keys of a DeepSpeed JSON", _json_keys),
    "metrics": ("Keys of metrics.jsonl", _metrics),
    "events": ("Events of events.jsonl", _events),
    "exit-codes": ("Exit codes", _exit_codes),
    "manifest": ("Fields of a checkpoint's manifest", _manifest),
}
TOPICS |= {topic: (title, partial(_of_extension, each, function)) for each in extensions()
           for topic, (title, function) in each.reference.items()}
