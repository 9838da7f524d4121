"""The parsers of all subcommands, for the reference and for completion in shells."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pretrain.cli import Parser
from pretrain.cluster.launcher_flags import RANK_COMMANDS, launcher_parser
from pretrain.commands import COMMANDS
from pretrain.config.flags.parse import run_parser

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
