"""The exceptions that end a run with one line: bad input, and checkpoints that cannot be written."""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """Bad input, told in one line: `where: found FOUND; expected EXPECTED. REMEDY`.

    `main()` functions turn it into that line on stderr and exit code 2.
    """

    def __init__(self, where: str, *, found: object, expected: str, remedy: str = "") -> None:
        line = " ".join(f"{where}: found {found}; expected {expected}. {remedy}".rstrip(". ").split())
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean "x"?`, or "" where nothing in `known` is close to `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else ""
