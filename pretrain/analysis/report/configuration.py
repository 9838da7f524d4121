"""The record of a start (run.json) as lines of text, and the differences between records."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# these sections first, in this order; the others follow in the order of the record
_SECTIONS = ("flags", "deepspeed_config", "model_config", "num_parameters", "train_steps", "layout", "batch", "data",
             "tokenizer", "versions", "git_commit", "hardware", "hosts")
_LONGEST_VALUE = 2000  # characters; longer values are replaced by their hash
_MAX_SETTINGS = 5000
_MAX_DEPTH = 12
# differ between any two starts, or repeat other values
_NOT_COMPARED = ("time", "command", "given_deepspeed_config")
_PLACES = {("flags", "save"), ("flags", "local_rank")}


@dataclass(frozen=True)
class Difference:
    """A setting that differs. A value is None in a run that does not have the setting."""

    section: str
    key: str  # "" if the section is one value
    values: tuple[str | None, ...]  # by run


def settings(record: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return {(section, key): value as text}. Keys of nested objects are joined with dots."""
    found: dict[tuple[str, str], str] = {}
    others = [name for name in record if name not in _SECTIONS]
    for section in (*(name for name in _SECTIONS if name in record), *others):
        _flatten(section, "", record[section], found, depth=0)
    return found


def _flatten(section: str, key: str, value: Any, found: dict[tuple[str, str], str], *, depth: int) -> None:
    if len(found) >= _MAX_SETTINGS:
        return
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value and depth < _MAX_DEPTH:
        for name, inner in value.items():
            _flatten(section, f"{key}.{name}" if key else str(name), inner, found, depth=depth + 1)
        return
    found[section, key] = as_text(value)


def as_text(value: Any) -> str:
    """Return a string as it is, and other values as JSON. A long text becomes its size and hash."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError):
        text = "(nested too deeply)"
    if len(text) <= _LONGEST_VALUE:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return f"({len(text):,} characters, SHA-256 {digest[:16]})"


def differences(records: Sequence[dict[str, Any]]) -> list[Difference]:
    """Return the settings that are not the same in all records, without times and the names of the run folders."""
    all_settings = [settings(record) for record in records]
    keys = dict.fromkeys(key for found in all_settings for key in found)
    order = {name: number for number, name in enumerate(_SECTIONS)}
    rows = [Difference(section, key, tuple(found.get((section, key)) for found in all_settings))
            for section, key in keys if section not in _NOT_COMPARED and (section, key) not in _PLACES]
    rows = [row for row in rows if len(set(row.values)) > 1]
    return sorted(rows, key=lambda row: order.get(row.section, len(order)))


def changes_between(starts: Sequence[dict[str, Any]]) -> list[list[Difference]]:
    """Return, for each start, its differences from the start before it; none for the first."""
    return [[], *(differences(pair) for pair in itertools.pairwise(starts))][:len(starts)]
