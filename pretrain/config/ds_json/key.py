"""`Key`: legal values of one key of a DeepSpeed JSON; `Tree`: the keys of a block."""

from dataclasses import dataclass
from typing import Any, Union


@dataclass(frozen=True)
class Key:
    """Legal values of one key of the JSON, and whether the key has an effect in this program."""

    kind: str = "any"  # bool, int, number, str, list (of strings), pair (two numbers), interval (number or inf)
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()  # legal strings
    auto: bool = False  # "auto" is legal; flags, model or run length fill it
    null: bool = False
    rejected: str = ""  # why every value but the neutral ones is rejected, and what to do instead
    neutral: tuple[Any, ...] = ()  # values that request nothing (besides false, null, {} and "enabled": false)
    ignored: str = ""  # why no value has an effect here: the key is left out, with a note


Tree = dict[str, Union[Key, "Tree"]]

BOOL = Key("bool")
COUNT = Key("int", low=0)
POSITIVE = Key("int", low=1)


def rejected(reason: str, *neutral: Any) -> Key:
    """Return a key that is rejected, except with neutral values."""
    return Key(rejected=reason, neutral=neutral)


def ignored(reason: str, *neutral: Any, kind: str = "bool", low: float | None = None,
            high: float | None = None) -> Key:
    """Return a key that has no effect in this program; a note gives the reason."""
    return Key(kind, low, high, null=True, neutral=neutral, ignored=f"no effect: {reason}")
