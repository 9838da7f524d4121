"""Settings of other training programs: other_programs.yaml, and names that are known as keys here.

Errors hint at what a setting is called here.
"""

import fnmatch
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pretrain.active_extensions import extensions
from pretrain.config.ds_json.schema import TREE, Key
from pretrain.model.families import FAMILIES

MATTERS, NO_EFFECT = "matters", "no_effect"  # tables of settings without a counterpart


@cache
def tables() -> dict[str, Any]:
    """Return the tables by name."""
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def names_elsewhere() -> dict[str, str]:
    """Return --FLAG -> its names in other programs, separated by spaces: of flags of the core and of extensions."""
    of_extensions = {f"--{name}": flag.metadata["flag"].elsewhere
                     for each in extensions() for name, flag in each.flags.items()}
    return {**tables()["flags"], **{name: names for name, names in of_extensions.items() if names}}


@cache
def hints() -> dict[str, str]:
    """Return name of a setting -> hint."""
    by_hint = {**{f"here it is {ours}": names for ours, names in names_elsewhere().items()},
               **{f"write {ours} into the DeepSpeed JSON": names for table in ("degrees", "json")
                  for ours, names in tables()[table].items()},
               **tables()["others"]}
    of_models = {*tables()["model"].split(), *(key for family in FAMILIES.values() for key in family.keys)}
    of_json = [name for name, key in TREE.items() if not (isinstance(key, Key) and key.rejected)]
    return {**dict.fromkeys(of_json, "it is a key of the DeepSpeed JSON"),
            **dict.fromkeys(of_models, "it belongs into the config.json that --model names; --model_overrides changes "
                                       "keys of that file"),
            **groups(by_hint)}


def hint_for(name: str) -> str:
    """Return what a setting of another program is called here, or "". `name` may have leading and inner hyphens."""
    return hints().get(name.lstrip("-").replace("-", "_"), "")


def degree_for(name: str) -> str:
    """Return the key of the DeepSpeed JSON for a degree of parallelism of another program, or ""."""
    return next((key for key, names in tables()["degrees"].items() if name in names.split()), "")


def groups(table: Mapping[str, str]) -> dict[str, str]:
    """Return name -> the key of its group, of a table that has names after each key."""
    return {name: group for group, names in table.items() for name in names.split()}


@cache
def without_counterpart(table: str, name: str) -> tuple[str, str] | None:
    """Return why a setting has no counterpart here, and the value with which it is off; None if it is not in the table.

    `table` is MATTERS or NO_EFFECT. The value is "" unless the table gives one.
    """
    return reason_in(groups(tables()[table]), name)


def reason_in(reasons: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """Return the reason for the first PATTERN or PATTERN=VALUE that fits a name, and the value or ""."""
    for word, reason in reasons.items():
        pattern, _, neutral = word.partition("=")
        if fnmatch.fnmatchcase(name, pattern):
            return reason, neutral
    return None
