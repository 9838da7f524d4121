"""The settings of another program: its files and command line give them, and tables have its defaults and names.

The tables are tables.yaml and pretrain/config/other_programs.yaml.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.other_programs import (
    MATTERS,
    NO_EFFECT,
    groups,
    hints,
    names_elsewhere,
    reason_in,
    tables,
    without_counterpart,
)
from pretrain.errors import ConfigError, shorten

# programs that are read, by the value of --from
PROGRAMS = {"neox": "GPT-NeoX", "megatron": "Megatron-LM", "trainer": "transformers.Trainer",
            "torchtitan": "torchtitan"}
_TOO_LARGE = 2**63
_TRUE, _FALSE = ("true", "yes", "1", "t", "y"), ("false", "no", "0", "f", "n")
OFF: tuple[Any, ...] = (None, False, 0, "", "none", "None", "false", "False", "0", [], {})
"""values that turn a setting off"""


@cache
def _tables() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8")))


@cache
def _group_of(table: str) -> dict[str, str]:
    """Return name -> the key of its group in a table."""
    return groups(_tables()[table])


@cache
def names_for(flag: str) -> tuple[str, ...]:
    """Return the names of a flag of a run in other programs; its own name comes first, if it has no other meaning."""
    own = () if flag in hints() else (flag,)
    return (*own, *names_elsewhere().get(f"--{flag}", "").split())


def defaults_of(program: str) -> Mapping[str, Any]:
    """Return the values of settings that a program of PROGRAMS has if they are absent."""
    values: Mapping[str, Any] = _tables()["defaults"][program]
    return values


def flavor_of(name: str, flavor: str) -> Mapping[str, Any] | None:
    """Return a model of torchtitan: the name of a preset, and keys of its config.json that differ. None: unknown."""
    found: Mapping[str, Any] | None = _tables()["flavors"].get(name, {}).get(flavor)
    return found


def current_name(name: str) -> str:
    """Return the current name of a setting of which `name` may be another spelling."""
    return _group_of("aliases").get(name, name)


def conversion_for(name: str) -> str:
    """Return the conversion in flags.py for the value of a setting, or ""."""
    return _group_of("convert").get(name, "")


def difference_of(name: str) -> str:
    """Return how the meaning of a setting differs here, or ""."""
    return _group_of("differs").get(name, "")


def reason_if_unused(program: str, name: str) -> str:
    """Return why a setting of a program of PROGRAMS has no effect if no part of the translation uses it, or ""."""
    return next((why for why, names in _tables()["unused"][program].items() if name in names.split()), "")


@cache
def refusal_of(name: str) -> tuple[str, str] | None:
    """Return why no family of models here computes a setting, and the value with which it is off, or ""."""
    return reason_in(_group_of("refused"), name)


def is_known(name: str) -> bool:
    """Return whether a table has a setting of another program, besides the flags of a run."""
    return name in hints() or name in _tables()["translated"].split() or refusal_of(name) is not None or any(
        without_counterpart(table, name) is not None for table in (MATTERS, NO_EFFECT))


def known_names() -> list[str]:
    """List all names that the tables know, without patterns."""
    words = [*hints(), *_tables()["translated"].split(), *_group_of("aliases"),
             *_group_of("refused"), *(name for table in (MATTERS, NO_EFFECT) for name in groups(tables()[table]))]
    return [word.partition("=")[0] for word in words if "*" not in word]


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
