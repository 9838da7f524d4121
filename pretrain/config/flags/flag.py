"""One flag of `pretrain/train.py`: a dataclass field with its help text."""

from dataclasses import field
from typing import Any


def flag(default: Any, help: str, *, unset: str = "none", **metadata: str) -> Any:
    """Return a dataclass field whose help text ends with the default. `unset` is shown if there is no default."""
    if default is None or default == "":
        shown = unset
    else:
        shown = "off" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown if "required" in shown else f"default: {shown}"
    return field(default=default, metadata={"help": f"{help} ({shown})".replace("%", "%%"), **metadata})
