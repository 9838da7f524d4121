"""Bytes of one rank by role (what the bytes are for) and location (which memory holds them), and bytes as text.

Estimates, simulations and measurements all return a Footprint, so that they can be compared role by role.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
GB = 10**9
UNITS = ("GiB", "GB", "MiB")  # choices of --unit
_UNIT_BYTES = {"MiB": 2**20, "GiB": GIB, "GB": GB, "TB": 1000 * GB}
DEFAULT_MARGIN = 0.05  # fraction of device memory that holds no tensors: CUDA context, NCCL buffers, workspaces
ROLES = ("parameters", "gradients", "master_weights", "optimizer_states", "buffers", "activations", "logits", "margin")
STATES = ROLES[:4]
# pinned: page-locked host memory. The layout decides the location, not `tensor.device`: every tensor that is not
# offloaded counts as "device", even where the accelerator is the CPU.
LOCATIONS = ("device", "pinned", "host", "nvme")

Key = tuple[str, str]  # (role, location)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank by (role, location). Missing pairs are 0."""

    sizes: Mapping[Key, int] = field(default_factory=dict)

    def total(self, role: str | None = None, location: str | None = None) -> int:
        """Sum the bytes of a role, of a location, of both, or (no argument) of everything."""
        total = 0
        for (own_role, own_location), size in self.sizes.items():
            if (role is None or role == own_role) and (location is None or location == own_location):
                total += size
        return total

    def states(self, location: str | None = None) -> int:
        """Sum the bytes of parameters, gradients, master weights and optimizer states."""
        return sum(self.total(role, location) for role in STATES)

    def __add__(self, other: "Footprint") -> "Footprint":
        if not (self.sizes and other.sizes):
            return self if self.sizes else other
        sizes = dict(self.sizes)
        for key, size in other.sizes.items():
            sizes[key] = sizes.get(key, 0) + size
        return Footprint(sizes)

    @classmethod
    def of(cls, parts: Iterable[tuple[Key, int]]) -> "Footprint":
        """Sum ((role, location), bytes) pairs; the same key may occur several times."""
        sizes: dict[Key, int] = {}
        for key, size in parts:
            if size:
                sizes[key] = sizes.get(key, 0) + int(size)
        return cls(sizes)

    @classmethod
    def on_device(cls, **sizes: int) -> "Footprint":
        """Return a footprint with these bytes on the device, by role."""
        return cls({(role, "device"): int(size) for role, size in sizes.items() if size})

    def rows(self) -> list[tuple[str, str, int]]:
        """List (role, location, bytes) in the order of ROLES and LOCATIONS. Pairs of 0 bytes are left out."""
        return [(role, location, self.sizes[role, location]) for role in ROLES for location in LOCATIONS
                if self.sizes.get((role, location))]

    def to_json(self) -> dict[str, dict[str, int]]:
        """Convert to {role: {location: bytes}}."""
        result: dict[str, dict[str, int]] = {}
        for role, location, size in self.rows():
            result.setdefault(role, {})[location] = size
        return result

    @classmethod
    def of_json(cls, values: Mapping[str, Mapping[str, Any]]) -> "Footprint":
        """Make a footprint from the result of `to_json`."""
        return cls.of(((role, location), int(size)) for role, sizes in values.items()
                      for location, size in sizes.items())


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank during some steps of an engine, measured or simulated."""

    held: Footprint  # between backward pass and optimizer step; swap files included, with their sizes on disk
    peak_bytes: int  # of all tensors together in a step after the first; on CUDA max_memory_allocated
    unaccounted_bytes: int  # of tensors alive at that point that the inventory did not find; -1 on CUDA: not known

    def to_json(self) -> dict[str, Any]:
        """Convert to the fields' names and values."""
        return {**vars(self), "held": self.held.to_json()}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "RankMemory":
        """Make an object from the result of `to_json`."""
        return cls(**{**values, "held": Footprint.of_json(values["held"])})


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
