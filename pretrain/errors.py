"""The exceptions that end a run with one line: bad input, and checkpoints that cannot be written."""

import difflib
from collections.abc import Iterable
from typing import Any

_LONGEST_PLACE = 1000  # characters of a path and key
_LONGEST_VALUE = 300  # characters of a value that a message shows


class ConfigError(ValueError):
    """Bad input, reported in one line that names where it is, what is wrong and what to do.

    With two values, `ConfigError("--seed", found=-1, expected="at least 0")`: `--seed: found -1; expected at least 0.`
    Otherwise a sentence, `ConfigError("--save", problem="the folder is read-only")`: `--save: the folder is read-only.`
    `main()` functions turn it into that line on stderr and exit code 2.
    """

    def __init__(self, where: str, *, found: object = None, expected: str = "", problem: str = "",
                 remedy: str = "") -> None:
        what = problem or f"found {shorten(str(found))}; expected {expected}"
        line = shown(f"{shorten(where, _LONGEST_PLACE)}: {what}. {remedy}".rstrip(". "))
        super().__init__(line if line.endswith("?") else f"{line}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError.of_line, (str(self),)  # how it travels between ranks

    @classmethod
    def of_line(cls, line: str) -> "ConfigError":
        """What another rank found, from its line."""
        error = cls.__new__(cls)
        error.args = (line,)
        return error


class SaveError(Exception):
    """A checkpoint could not be written. The earlier ones are as they were."""


def shorten(text: str, longest: int = _LONGEST_VALUE) -> str:
    """`text`, or its beginning and its length where it is longer than a line can show."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def shown(text: str) -> str:
    """`text` on one line, with escapes for characters that a terminal would act on."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean "x"?`, or "" where nothing in `known` is close to `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else ""
