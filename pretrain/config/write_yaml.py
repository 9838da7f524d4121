"""Write the YAML of a run: comments, and keys with their values. Any text in them remains a comment or a value."""

from typing import Any

import yaml

from pretrain.errors import one_line

_NO_WRAP = 2**20  # columns
_LINE_END = "\n"


def comment_line(text: str) -> str:
    """Return a comment with its line break.

    Line breaks of `text` are escaped: what follows one would be a key, and the text may be from a foreign file.
    """
    return f"# {one_line(text)}{_LINE_END}"


def yaml_entry(key: str, value: Any, *, lists_on_one_line: bool = False, remark: str = "") -> str:
    """Return a key with its value and an optional comment behind it, with the line break."""
    text = f"{key}: {_dump(value, default_flow_style=True).removesuffix(f'...{_LINE_END}')}" if lists_on_one_line else \
        _dump({key: value}, sort_keys=False)
    return text.rstrip(_LINE_END) + (f"  # {one_line(remark)}" if remark else "") + _LINE_END


def _dump(value: Any, **style: bool) -> str:
    """Return YAML without line breaks in texts of one line. Letters remain, and other line breaks are escaped.

    PyYAML writes U+0085, U+2028 and U+2029 as they are, and reads them as spaces.
    """
    settings: dict[str, Any] = {"width": _NO_WRAP, **style}
    text: str = yaml.safe_dump(value, allow_unicode=True, **settings)
    if not all(line.isprintable() for line in text.split(_LINE_END)):
        text = yaml.safe_dump(value, **settings)
    return text
