"""Hints for settings of other training programs: other_programs.yaml, and names that are known as keys here."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.ds_json.schema import TREE, Key
from pretrain.model.families import FAMILIES


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
