"""Bytes of one rank by role (what the bytes are for) and location (which memory holds them).

Estimates, simulations and measurements all return a Footprint, so that they can be compared role by role.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

    def __post_init__(self) -> None:
        for role, location in self.sizes:
            if role not in ROLES or location not in LOCATIONS:
                raise ValueError(f"({role!r}, {location!r}) is not a role and a location of a Footprint. "
                                 f"Roles: {ROLES}; locations: {LOCATIONS}.")

    def total(self, role: str | None = None, location: str | None = None) -> int:
        """Sum the bytes of a role, of a location, of both, or (no argument) of everything."""
        return sum(size for (own_role, own_location), size in self.sizes.items()
                   if role in (None, own_role) and location in (None, own_location))

    def states(self, location: str | None = None) -> int:
        """Sum the bytes of parameters, gradients, master weights and optimizer states."""
        return sum(self.total(role, location) for role in STATES)

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint.of([*self.sizes.items(), *other.sizes.items()])

    @classmethod
    def of(cls, parts: Iterable[tuple[Key, int]]) -> "Footprint":
        """Sum ((role, location), bytes) pairs; the same key may occur several times."""
        sizes: dict[Key, int] = {}
        for key, size in parts:
            if size:
                sizes[key] = sizes.get(key, 0) + int(size)
        return cls(sizes)

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
