"""Wrong values of the flags: see tests/wrong_inputs/inputs.py."""

from typing import Any

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"train_data": "nosuch://bucket/corpus"}, "protocol nosuch"),
    ({}, {"data_cache_gb": 1}, "it has no effect"),
    ({}, {"data_cache": "cache"}, "it has no effect"),
]
