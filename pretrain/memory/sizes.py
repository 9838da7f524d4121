"""Bytes as text: with a unit, or as a number for a table."""

from pretrain.memory.hardware import GB, GIB

UNITS = ("GiB", "GB", "MiB")  # choices of --unit
_UNIT_BYTES = {"MiB": 2**20, "GiB": GIB, "GB": GB, "TB": 1000 * GB}


def in_unit(size_bytes: float, unit: str) -> str:
    """Format bytes as a table's number: one decimal, below 1 two significant digits, "-" for 0."""
    number = size_bytes / _UNIT_BYTES[unit]
    if not size_bytes:
        return "-"
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def with_unit(size_bytes: int) -> str:
    """Format bytes with a unit: MiB below 1 GiB, TB from 1000 GiB, GiB between."""
    unit = "MiB" if size_bytes < GIB else "GiB" if size_bytes < 1000 * GIB else "TB"
    return f"{in_unit(size_bytes, unit) if size_bytes else 0} {unit}"
