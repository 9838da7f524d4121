"""The settings of another program, as its files and its command line give them, with the program's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.translate.tables import PROGRAMS, defaults_of

_TOO_LARGE = 2**63
_TRUE, _FALSE = ("true", "yes", "1", "t", "y"), ("false", "no", "0", "f", "n")
OFF: tuple[Any, ...] = (None, False, 0, "", "none", "None", "false", "False", "0", [], {})
"""values that turn a setting off"""


@dataclass(frozen=True)
class WrittenFile:
    """A file that a script writes."""

    text: str | None  # None: not understood
    notes: tuple[str, ...]  # lines that were not understood, on which it depends


@dataclass(frozen=True)
class Settings:
    """Settings by their names, with _ instead of -, and a dot before the names inside a block of TOML."""

    program: str  # a key of PROGRAMS
    given: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)  # name -> the file, and the name as it is spelled there
    launcher: Mapping[str, Any] = field(default_factory=dict)  # flags before the program on a command line
    notes: tuple[str, ...] = ()  # what reading a script has left open
    written: Mapping[str, WrittenFile] = field(default_factory=dict)  # files that a script writes, by their paths

    @property
    def program_name(self) -> str:
        """The program's name in sentences."""
        return PROGRAMS[self.program]

    def where(self, name: str) -> str:
        """Return where a setting stands, for errors."""
        return self.places.get(name, f"{self.program_name}: {name}")

    def has(self, name: str) -> bool:
        """Return whether the input has a setting, with any value but null."""
        return self.given.get(name) is not None

    def only(self, *names: str) -> list[str]:
        """Return those of the names that the input has."""
        return [name for name in names if self.has(name)]

    def first(self, *names: str) -> str:
        """Return the first of the names that the input has; "": none."""
        return next((name for name in names if self.has(name)), "")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or the program's default, or else `default`."""
        if self.has(name):
            return self.given[name]
        value = defaults_of(self.program).get(name)
        return default if value is None else value

    def is_on(self, name: str) -> bool:
        """Return the value of a switch. Raises ConfigError."""
        value = self.get(name, False)
        if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        if isinstance(value, str) and value.startswith("$"):  # further arguments, after a switch
            return True
        if not isinstance(value, bool) and value not in (0, 1):
            raise self.wrong(name, "true or false")
        return bool(value)

    def number(self, name: str, default: Any = None) -> Any:
        """Return the value of a number; None if there is none. Raises ConfigError."""
        value = self.get(name, default)
        if value is None:
            return None
        found = as_number(value)
        if found is None:
            raise self.wrong(name, "a number")
        return found

    def whole(self, name: str, default: int | None = None, *, low: int = 0) -> Any:
        """Return the value of a whole number; None if there is none. Raises ConfigError."""
        value = self.number(name, default)
        if value is None:
            return None
        if value != int(value) or value < low:
            raise self.wrong(name, f"a whole number from {low}")
        return int(value)

    def needed(self, name: str) -> int:
        """Return the value of a whole number without which there is no translation. Raises ConfigError."""
        value: int | None = self.whole(name, low=1)
        if value is None:
            raise ConfigError(f"{self.program_name}: {name}", problem="it is missing",
                              remedy="give all files of the run, or the setting itself")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return the value of a single word. Raises ConfigError."""
        value = self.get(name, default)
        if isinstance(value, (list, dict)) or value is True:
            raise self.wrong(name, "one word")
        return str(value)

    def words(self, name: str) -> list[str]:
        """Return a value that may have several words, as a list."""
        value = self.get(name)
        items = value if isinstance(value, list) else [] if value is None else str(value).split()
        return [str(item) for item in items]

    def choice(self, name: str, choices: Mapping[str, Any], default: str = "") -> Any:
        """Return what a word stands for. Raises ConfigError for a word without a meaning here."""
        word = self.text(name, default)
        found = {key.lower(): value for key, value in choices.items()}
        if word.lower() not in found:
            raise ConfigError(self.where(name), found=shorten(word), expected=f"one of {', '.join(choices)}, which "
                              "have a counterpart here", word=word, known=choices)
        return found[word.lower()]

    def wrong(self, name: str, expected: str) -> ConfigError:
        """Return the error for a value."""
        return ConfigError(self.where(name), found=shorten(str(self.get(name))), expected=expected)


def as_number(value: Any) -> int | float | None:
    """Return a number of at most 64 bits, also from a word such as 9_765_625 or 6e-5; None for other values."""
    if isinstance(value, str):
        word = value.strip().replace("_", "")
        try:
            value = int(word)
        except ValueError:
            try:
                value = float(word)
            except ValueError:
                return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _TOO_LARGE else None  # false for NaN
