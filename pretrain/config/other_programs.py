"""Settings of other training programs: other_programs.yaml, and names that are known as keys here.

Two commands read the table: errors hint at what a setting is called here, and `ds-pretrain translate` translates it.
"""

import fnmatch
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.ds_json.schema import TREE, Key
from pretrain.model.families import FAMILIES

# programs that `ds-pretrain translate` reads, by the value of --from
PROGRAMS = {"neox": "GPT-NeoX", "megatron": "Megatron-LM", "trainer": "transformers.Trainer",
            "torchtitan": "torchtitan"}
REFUSED, MATTERS, NO_EFFECT = "refused", "matters", "no_effect"  # tables of settings without a counterpart


@cache
def _tables() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


@cache
def hints() -> dict[str, str]:
    """Return name of a setting -> hint."""
    tables = _tables()
    groups = {**{f"here it is {ours}": names for ours, names in tables["flags"].items()},
              **{f"write {ours} into the DeepSpeed JSON": names for table in ("degrees", "json")
                 for ours, names in tables[table].items()},
              **tables["others"]}
    of_models = {*tables["model"].split(), *(key for family in FAMILIES.values() for key in family.keys)}
    of_json = [name for name, key in TREE.items() if not (isinstance(key, Key) and key.rejected)]
    return {**dict.fromkeys(of_json, "it is a key of the DeepSpeed JSON"),
            **dict.fromkeys(of_models, "it belongs into the config.json that --model names; --model_overrides changes "
                                       "keys of that file"),
            **{name: hint for hint, names in groups.items() for name in names.split()}}


def hint_for(name: str) -> str:
    """Return what a setting of another program is called here, or "". `name` may have leading and inner hyphens."""
    return hints().get(name.lstrip("-").replace("-", "_"), "")


def degree_for(name: str) -> str:
    """Return the key of the DeepSpeed JSON for a degree of parallelism of another program, or ""."""
    return next((key for key, names in _tables()["degrees"].items() if name in names.split()), "")


@cache
def names_for(flag: str) -> tuple[str, ...]:
    """Return the names of a flag of a run in other programs; its own name comes first, if it has no other meaning."""
    own = () if flag in hints() else (flag,)
    return (*own, *_tables()["flags"].get(f"--{flag}", "").split())


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
    """Return the conversion in commands/translate/copied_flags.py for the value of a setting, or ""."""
    return _group_of("convert").get(name, "")


def difference_of(name: str) -> str:
    """Return how the meaning of a setting differs here, or ""."""
    return _group_of("differs").get(name, "")


def reason_if_unused(program: str, name: str) -> str:
    """Return why a setting of a program of PROGRAMS has no effect if no part of the translation uses it, or ""."""
    return next((why for why, names in _tables()["unused"][program].items() if name in names.split()), "")


@cache
def _group_of(table: str) -> dict[str, str]:
    """Return name -> the key of its group in a table."""
    return {name: group for group, names in _tables()[table].items() for name in names.split()}


@cache
def without_counterpart(table: str, name: str) -> tuple[str, str] | None:
    """Return why a setting has no counterpart here, and the value with which it is off; None if it is not in the table.

    `table` is REFUSED, MATTERS or NO_EFFECT. The value is "" unless the table gives one.
    """
    for word, reason in _group_of(table).items():
        pattern, _, neutral = word.partition("=")
        if fnmatch.fnmatchcase(name, pattern):
            return reason, neutral
    return None


def is_known(name: str) -> bool:
    """Return whether a table has a setting of another program, besides the flags of a run."""
    return name in hints() or name in _tables()["translated"].split() or any(
        without_counterpart(table, name) is not None for table in (REFUSED, MATTERS, NO_EFFECT))


def known_names() -> list[str]:
    """List all names that the tables know, without patterns."""
    words = [*hints(), *_tables()["translated"].split(), *_group_of("aliases"),
             *(name for table in (REFUSED, MATTERS, NO_EFFECT) for name in _group_of(table))]
    return [word.partition("=")[0] for word in words if "*" not in word]
