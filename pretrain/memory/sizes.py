"""Sizes in bytes, for people."""

from pretrain.memory.hardware import GB, GIB

UNITS = ("GiB", "GB", "MiB")  # of a table
_UNIT_BYTES = {"MiB": 2**20, "GiB": GIB, "GB": GB, "TB": 1000 * GB}


def in_unit(size_bytes: float, unit: str) -> str:
    """A cell of a table: one decimal, below 1 two significant digits; "-" for nothing."""
    number = size_bytes / _UNIT_BYTES[unit]
    if not size_bytes:
        return "-"
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def with_unit(size_bytes: int) -> str:
    """In a sentence, in the unit that suits it: MiB below one GiB, TB from a thousand GiB on."""
    unit = "MiB" if size_bytes < GIB else "GiB" if size_bytes < 1000 * GIB else "TB"
    return f"{in_unit(size_bytes, unit) if size_bytes else 0} {unit}"
