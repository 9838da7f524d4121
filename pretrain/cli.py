"""Helpers for the `main` of every program: one-line errors, exit codes, flags with - or _, and argument types."""

import argparse
import contextlib
import errno
import functools
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from pretrain.errors import CRASHED, ConfigError, one_line, shorten
from pretrain.old_names import current_name
from pretrain.terminal import OutputError, drop_lost_output, escape_output

LARGEST_INT = 2**63 - 1
OWNED = "DS_PRETRAIN_FOLLOWED"  # environment variable: the process that started this one owns the start of the run
LONGEST_SECONDS = 31_536_000.0  # a year; threading and select overflow on far longer timeouts
_LONGEST_PROBLEM = 1000  # characters
_URL = re.compile(r"[a-z][a-z0-9+.-]*(?:::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TYPE_NAMES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError and accepts --vocab-size for --vocab_size.

    `instead` is called with a parser instead of parsing, and with True if the parser passes on what it does not know.
    """

    instead: ClassVar[Callable[["Parser", bool], NoReturn] | None] = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._words: list[str] = []  # words of the command line, for errors

    def parse_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        if Parser.instead is not None:
            Parser.instead(self, False)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                         namespace: argparse.Namespace | None = None) -> tuple[argparse.Namespace, list[str]]:
        if Parser.instead is not None:
            Parser.instead(self, True)
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        self._words = words[:end]
        for name in (word.partition("=")[0] for word in self._words if word.startswith("--")):
            if self._as_declared(name) == f"--{current_name(name[2:])}":
                note_old_name(name[2:], "command line")
        return super().parse_known_args([self._as_declared(word) for word in words[:end]] + words[end:], namespace)

    def _as_declared(self, word: str) -> str:
        """Return the word as it is declared: --no_append-eod=1 becomes --no-append_eod=1, and old names become new."""
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            return word
        declared = {option[2:].replace("-", "_"): option for option in self._option_string_actions}
        bare = name[2:].replace("-", "_")
        return declared.get(bare, declared.get(current_name(bare), name)) + equals + value

    def takes_value(self, word: str) -> bool | None:
        """Return whether the flag `word` is followed by a value; None for a word that is not a flag of this parser."""
        action = self._option_string_actions.get(self._as_declared(word).partition("=")[0])
        return None if action is None else action.nargs != 0 and "=" not in word

    def error(self, message: str) -> NoReturn:
        flags = self._option_string_actions
        if "arguments are required: --" in message:  # a misspelt flag is the likely reason, so it is reported instead
            for word in self._words:
                if word.startswith("--") and self.takes_value(word) is None:
                    raise unknown_flag(word, flags)
        raise argument_error(message, flags)


def argument_error(message: str, flags: Iterable[str]) -> ConfigError:
    """Convert argparse's message to a ConfigError that begins with the flag; `flags` are all flags of the program."""
    name, of_argument, problem = message.removeprefix("argument ").partition(": ")
    if not message.startswith("argument ") or not of_argument:
        return _command_line_error(message, flags)
    flag = name.split("/")[0]
    if wrong := re.fullmatch(r"invalid (\w+) value: (.*)", problem, re.DOTALL):
        return ConfigError(flag, found=wrong[2], expected=_TYPE_NAMES.get(wrong[1], "a value of another type"))
    if wrong := re.fullmatch(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", problem, re.DOTALL):
        choices = [choice.strip("' ") for choice in wrong[2].split(",")]
        return ConfigError(flag, found=repr(wrong[1]), expected=f"one of {', '.join(choices)}",
                           word=wrong[1], known=choices)
    if wrong := re.fullmatch(r"ignored explicit argument (.*)", problem, re.DOTALL):
        return ConfigError(flag, problem=f"this flag takes no value, and {shorten(wrong[1])} is given")
    if problem.startswith("expected "):
        return ConfigError(flag, problem="the value is missing", remedy="--help describes it")
    return ConfigError(flag, problem=shorten(problem, _LONGEST_PROBLEM))


def _command_line_error(message: str, flags: Iterable[str]) -> ConfigError:
    unknown = message.partition("unrecognized arguments: ")[2].split()
    if unknown:
        return unknown_flag(unknown[0], flags)
    required = message.partition("arguments are required: ")[2]
    if required:
        return ConfigError(required, problem="it is required, and missing on the command line")
    return ConfigError("command line", problem=shorten(message, _LONGEST_PROBLEM))


def unknown_flag(word: str, flags: Iterable[str], hint: Callable[[str], str] = lambda name: "") -> ConfigError:
    """Return the error for a word that is not a flag of the program.

    `hint` returns a remedy for a name, or "". Otherwise a similar flag is suggested.
    """
    name = word.split("=")[0]
    if not word.startswith("-"):
        is_settings = word.endswith((".yaml", ".yml")) and "--config" in flags
        return ConfigError("command line", problem=f"{shorten(word)!r} is not the value of any flag",
                           remedy=f"the settings of a run have a flag: --config {shorten(word)}" if is_settings else
                           "quote values that contain spaces; --help lists the flags")
    if remedy := hint(name):
        return ConfigError(shorten(name), problem="there is no such flag", remedy=remedy)
    underscored = name if "--no-" in name else name.replace("-", "_").replace("__", "--", 1)
    return ConfigError(shorten(name), problem="there is no such flag", remedy="--help lists the flags",
                       word=underscored, known=flags)


@dataclass(frozen=True)
class Number:
    """Argparse type: a finite number in a range. Tests generate wrong inputs from the range."""

    low: float
    high: float
    is_above: bool = False  # numbers must be greater than `low`
    is_whole: bool = False

    def __call__(self, word: str) -> Any:
        """Return an int if `is_whole`, otherwise a float. Words such as 7.5e9 are whole numbers."""
        try:
            value = float(word)
            if self.is_whole:
                value = int(value) if value.is_integer() and not word.strip("+-").isdecimal() else int(word)
        except (ValueError, OverflowError):
            value = math.nan
        if self.low <= value <= self.high and not (self.is_above and value == self.low):
            return value
        kind, digits = ("a whole number", "") if self.is_whole else ("a number", "g")
        least = f"{'above' if self.is_above else 'from'} {self.low:{digits}}"
        upto = f" to {self.high:{digits}}" if self.high < (LARGEST_INT if self.is_whole else sys.float_info.max) else ""
        raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected {kind} {least}{upto}")


def chosen(flag: str, texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the words of a flag's values, between commas. Raises ConfigError for a word that is not known."""
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(flag, found=word or "an empty name", expected=", ".join(known), word=word, known=known)
    return words


def whole_number(low: int = 0, high: int = LARGEST_INT) -> Number:
    """Return an argparse type: a whole number from `low` to `high`."""
    return Number(low, high, is_whole=True)


def number(low: float = 0.0, high: float = sys.float_info.max, *, above: bool = False) -> Number:
    """Return an argparse type: a finite number from `low` (with `above`: greater than `low`) to `high`."""
    return Number(low, high, is_above=above)


def text(word: str) -> str:
    """Argparse type: text that is not empty. An unset shell variable would give an empty word."""
    if not word or "\0" in word:
        raise argparse.ArgumentTypeError("the value contains a NUL character" if word else
                                         "the value is empty; leave the flag out, or give it a value")
    return word


def path(word: str) -> Path:
    """Argparse type: a path. Rejects a word if `bad_path` returns a problem."""
    if problem := bad_path(text(word)):
        raise argparse.ArgumentTypeError(problem)
    return Path(word)


def path_text(word: str) -> str:
    """Argparse type: a path, returned as it was typed."""
    path(word)
    return word


def bad_path(word: str) -> str:
    """Return why `word` is not a valid path, or "" if it is valid. Shells do not expand `~` after `=`."""
    if word.startswith("~"):
        return f"the ~ of {shorten(word)!r} was not expanded by the shell; write the full path"
    try:
        os.lstat(word)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"the name {shorten(word)!r} is too long for a file"
    except UnicodeEncodeError:  # from a JSON file: a lone surrogate
        return f"{shorten(word)!r} cannot be the name of a file"
    return ""


def is_url(word: str) -> bool:
    """Return whether a word of the command line is a URL and not a path."""
    return _URL.match(word) is not None


def prefix(word: str) -> str:
    """Argparse type: the common prefix of a .bin and an .idx file, a path or a URL."""
    if word.endswith(("/", "/.", "/..")) or word in (".", ".."):
        raise argparse.ArgumentTypeError(f"{shorten(word)!r} is a folder; give a prefix such as data/corpus, which "
                                         "becomes data/corpus.bin and data/corpus.idx")
    if word.endswith((".bin", ".idx")):
        raise argparse.ArgumentTypeError(f"give the prefix without {word[-4:]}: {shorten(word[:-4])!r}")
    return word if is_url(word) else str(path(word))


def new_prefix(word: str) -> str:
    """Argparse type: the prefix of token files that are written: a path."""
    if is_url(word):
        raise argparse.ArgumentTypeError(f"{shorten(word)!r} is a URL, and token files are written to a disk; give a "
                                         "path, and upload its files afterwards")
    return prefix(word)


def say(line: str) -> None:
    """Print a line to stderr for the operator."""
    print(f"ds-pretrain: {line}\n", end="", file=sys.stderr, flush=True)  # one write: threads may print, too


@functools.cache
def note_old_name(name: str, where: str) -> None:
    """Print a note if a flag has another name today: once, by the process whose user has typed it."""
    if current_name(name) != name.replace("-", "_") and os.environ.get("RANK", "0") == "0" and OWNED not in os.environ:
        say(f"{where}: note: {name} is called {current_name(name)} now")


def next_line(command: str, word: str = "next") -> list[str]:
    """Return the line that names the next command, if there is one; none if a script runs them: DS_PRETRAIN_NEXT=0."""
    return [] if not command or os.environ.get("DS_PRETRAIN_NEXT") == "0" else [one_line(f"{word}: {command}")]


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with its code.

    Other codes: 2 for bad input, with one line on stderr; 130 if interrupted; 141 if stdout was closed; 1 if its
    disk is full.
    """
    escape_output()
    try:
        code = _call(main)
    except ConfigError as error:
        print(f"{error.details}ds-pretrain: error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("ds-pretrain: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    except OutputError as error:
        with contextlib.suppress(OSError):  # stderr may be the same file
            print(f"ds-pretrain: error: the output cannot be written: {error.strerror}.", file=sys.stderr)
        code = CRASHED
    drop_lost_output()
    sys.exit(code)


def _call(main: Callable[[], int | None]) -> int:
    """Call `main`, write what it has printed, and return its code."""
    try:
        code = main() or 0
    except SystemExit:  # as --help does
        _flush_stdout()
        raise
    _flush_stdout()
    return code


def _flush_stdout() -> None:
    if sys.stdout is not None:  # None: closed by the shell, as in `command >&-`
        sys.stdout.flush()


class StopRequest(BaseException):
    """Raised in the main thread by a signal. `name` is the name of the signal."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.remedy = "nothing has been written"
        super().__init__(self.name)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise StopRequest at the first signal, and ignore further ones. Signals that are ignored (nohup) remain so."""
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    used = [number for number in _STOP_SIGNALS if before[number] != signal.SIG_IGN]

    def stop(number: int, _: Any) -> None:
        for other in used:
            signal.signal(other, signal.SIG_IGN)
        raise StopRequest(number)

    for number in used:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in used:
            signal.signal(number, before[number])
