"""PREFIX.meta.json: the tokenizer of a data set, its vocabulary and its counts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.stored_json import read_object, reason_of

_REWRITE = "write it again with tools/prepare_data.py"


def meta_path(prefix: str | Path) -> Path:
    """Return the path of the .meta.json of a data set."""
    return Path(f"{prefix}.meta.json")


def current_meta(prefix: str | Path, *, num_tokens: int) -> dict[str, Any]:
    """Read PREFIX.meta.json. Return {} if there is none, or if it describes earlier data with this name."""
    meta = read_meta(prefix) or {}
    return meta if meta.get("num_tokens", num_tokens) == num_tokens else {}


def read_meta(prefix: str | Path) -> dict[str, Any] | None:
    """Read PREFIX.meta.json (vocab_size, tokenizer_sha256, ...). Return None if there is no such file.

    Raises ConfigError for a file that cannot be read or has invalid values.
    """
    path = meta_path(prefix)
    try:
        meta = read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = f"it cannot be read as JSON: {reason_of(error)}"
        raise ConfigError(str(path), problem=problem, remedy=_REWRITE) from None
    for key, (is_valid, expected) in _META_CHECKS.items():
        value = meta.get(key)
        if value is not None and (isinstance(value, bool) or not is_valid(value)):
            raise ConfigError(f"{path}: {key}", found=json.dumps(value), expected=expected, remedy=_REWRITE)
    return meta


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


_META_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("vocab_size", "num_tokens", "num_documents", "max_token", "bos_token", "eod_token"),
                    (_is_count, "a whole number, at least 0")),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (lambda value: isinstance(value, str), "a string")),
    "entropy_nats": (lambda value: isinstance(value, (int, float)) and 0 <= value < 100, "a number of nats"),
}
