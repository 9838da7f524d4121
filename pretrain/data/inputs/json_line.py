"""Find the text in a JSON line."""

from typing import Any

from pretrain.data.text import check_nul, check_unicode, parse_json
from pretrain.errors import ConfigError


def text_of_json_line(line: bytes, where: str, jsonl_key: str) -> str:
    """Return the text at `jsonl_key` of a JSON object. Raises ConfigError that begins with `where`.

    `jsonl_key` "a.b" is key b of the object at key a, unless there is a key of that name.
    """
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_json(where, f"0x{line[error.start]:02X} is not valid UTF-8 at byte {error.start + 1} of the line"
                       ) from None
    except (ValueError, RecursionError) as error:
        raise not_json(where, str(error)) from None
    if not isinstance(value, dict):
        raise ConfigError(where, found=f"a JSON {type(value).__name__}", expected="one JSON object per line")
    text = _value_at(value, jsonl_key)
    if not isinstance(text, str):
        raise no_text_error(where, jsonl_key, value)
    if b"\\u" in line:
        check_unicode(text, where)
        check_nul(text, where)
    return text


def not_json(where: str, problem: str) -> ConfigError:
    """Return the error for a line that is not valid JSON."""
    return ConfigError(where, problem=f"it is not valid JSON: {problem}", remedy="write one JSON object per line")


def _value_at(value: dict[str, Any], key: str) -> object:
    if key in value or "." not in key:
        return value.get(key)
    found: object = value
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def no_text_error(where: str, key: str, value: dict[str, Any]) -> ConfigError:
    """Return the error for a JSON object without a string at `key`."""
    found = _value_at(value, key)
    keys = ", ".join(list(value)[:8]) or "no keys"
    name_key = f"name the key of the text with --jsonl_key; this object has {keys}"
    if key not in value and found is None:
        return ConfigError(where, problem=f"the JSON object has no key {key!r}", word=key, known=value, remedy=name_key)
    problem = "null" if found is None else f"a JSON {type(found).__name__}, not a string"
    remedy = "correct or remove this line" + (f", or {name_key}" if len(value) > 1 else "")
    return ConfigError(where, problem=f"the value of {key!r} is {problem}", remedy=remedy)
