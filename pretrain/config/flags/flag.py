"""Declaration of a flag of a run: a field of RunArguments that the parser, --help, the range check, the
YAML reader, checkpoints and the tests of wrong inputs read.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.cli import LARGEST_INT
from pretrain.data.token_schedules import parse_token_count
from pretrain.errors import ConfigError, shorten
from pretrain.own_code import is_own


@dataclass(frozen=True)
class Flag:
    """The declaration of a flag, besides the name, the type and the default of its dataclass field."""

    group: "Group"
    help: str  # ends with the default; "==SUPPRESS==": not in --help
    parse: Callable[[str], Any] | None = None  # argparse type of a word; None: the field's type
    low: float | None = None  # smallest number
    above: float | None = None  # numbers must be greater than this
    high: float | None = None  # largest number
    below: float | None = None  # numbers must be smaller than this
    choices: Sequence[str] = ()
    takes_code: bool = False  # besides the choices, a name my_module:function of the user's code
    metavar: str | None = None  # of the value in --help; None: the choices, or N or X
    unset: Any = "none"  # default that a missing value gets elsewhere, or words about it
    override: str | None = None  # name of --override that allows another value than that in a checkpoint
    repeats: bool = False  # of an extension: a repetition of the run from its record sets it, too
    not_repeated: str = ""  # why it does not, in words
    of_host: bool = False  # hosts may have other values
    elsewhere: str = ""  # of an extension: names of the setting in other programs, separated by spaces
    is_secret: bool = False  # the value is left out of the command that run.json records

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a number out of range, and for a word that is not one of the choices."""
        where = f"--{name}"
        if self.choices and value is not None and value not in self.choices and not (self.takes_code and is_own(value)):
            raise ConfigError(where, found=value, expected=", ".join(self.choices), word=value, known=self.choices)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        high = LARGEST_INT if self.high is None and isinstance(value, int) else self.high
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(where, found=value, expected="a finite number")
        if self.low is not None and value < self.low:
            raise ConfigError(where, found=value, expected=f"at least {self.low}")
        if self.above is not None and value <= self.above:
            raise ConfigError(where, found=value, expected=f"above {self.above}")
        if self.below is not None and value >= self.below:
            raise ConfigError(where, found=value, expected=f"below {self.below}")
        if high is not None and value > high:
            raise ConfigError(where, found=value, expected=f"at most {high}" if isinstance(high, int) else
                              f"at most {high:.10g}")


@dataclass(frozen=True)
class Group:
    """A section of --help."""

    title: str
    description: str | None = None
    # why its flags are not recorded in run.json, compared between ranks, or repeated from a record; "": they are
    not_recorded: str = ""

    def flag(self, default: Any, help: str, *, unset: object = "none", **declared: Any) -> Any:
        """Return a dataclass field for a flag of this group. `unset` is shown as the default if there is none.

        `declared` are fields of `Flag`.
        """
        if default is None or default == "":
            shown = str(unset)
        else:
            shown = "off" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
        shown = shown if "required" in shown else f"default: {shown}"
        flag = Flag(self, f"{help} ({shown})".replace("%", "%%"), unset=unset, **declared)
        return dataclasses.field(default=default, metadata={"flag": flag})


def tokens(word: str) -> int:
    """Argparse type: a number of tokens, such as 1e9 or 2.5B. The range of the flag is checked later."""
    try:
        return int(word)
    except ValueError:
        count = parse_token_count(word)
        if count is None:
            raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected a whole number of tokens, such as "
                                             "1000000 or 1e6") from None
        return count
