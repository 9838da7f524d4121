"""Read the settings of other programs from tables.yaml and pretrain/config/other_programs.yaml."""

from collections.abc import Mapping
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

# programs that are read, by the value of --from
PROGRAMS = {"neox": "GPT-NeoX", "megatron": "Megatron-LM", "trainer": "transformers.Trainer",
            "torchtitan": "torchtitan"}


@cache
def _tables() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


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
    """Return the conversion in copied_flags.py for the value of a setting, or ""."""
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
