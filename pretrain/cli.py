"""What every program's `main` shares: one-line errors, exit codes, both spellings of a flag."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pretrain.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors, and that takes --vocab-size for --vocab_size."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                         namespace: argparse.Namespace | None = None) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        return super().parse_known_args([self._as_declared(word) for word in words[:end]] + words[end:], namespace)

    def _as_declared(self, word: str) -> str:
        """--no_append-eod=1 as --no-append_eod=1, if that is how the flag was declared."""
        name, equals, value = word.partition("=")
        declared = {option.replace("-", "_"): option for option in self._option_string_actions}
        return declared.get(name.replace("-", "_"), name) + equals + value if word.startswith("--") else word

    def takes_value(self, word: str) -> bool | None:
        """Whether the flag `word` is followed by a value; None for a word that is no flag of this parser."""
        action = self._option_string_actions.get(self._as_declared(word).partition("=")[0])
        return None if action is None else action.nargs != 0 and "=" not in word

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        remedy = did_you_mean(unknown[0].split("=")[0], self._option_string_actions) if unknown else ""
        raise ConfigError("command line", found=message, expected="the flags that --help lists", remedy=remedy)


def say(text: str) -> None:
    """A line for the operator."""
    print(f"ds-pretrain: {text}", file=sys.stderr, flush=True)


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Exit with main's code: 2 and one line on stderr for bad input, 130 when interrupted, 141 when nobody reads."""
    try:
        code = main() or 0
        sys.stdout.flush()
    except ConfigError as error:
        print(f"ds-pretrain: error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("ds-pretrain: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)
