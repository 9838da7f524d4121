"""Bytes of one rank by what they are for and by where they lie: what estimates and measurements have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ROLES = ("parameters", "gradients", "master_weights", "optimizer_states", "buffers", "activations", "logits", "margin")
STATES = ROLES[:4]
# Where the bytes lie in the layout, which decides it, not `tensor.device`: what is not offloaded counts as "device"
# even where the accelerator is the CPU. pinned: page-locked host memory.
PLACES = ("device", "pinned", "host", "nvme")

Key = tuple[str, str]  # (role, place)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank by (role, place); pairs that are not there are 0."""

    sizes: Mapping[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, place in self.sizes:
            if role not in ROLES or place not in PLACES:
                raise ValueError(f"footprint: found ({role!r}, {place!r}); roles: {ROLES}; places: {PLACES}")

    def total(self, role: str | None = None, place: str | None = None) -> int:
        """Bytes of a role, of a place, of both, or of everything."""
        return sum(size for (own_role, own_place), size in self.sizes.items()
                   if role in (None, own_role) and place in (None, own_place))

    def states(self, place: str | None = None) -> int:
        """Bytes of parameters, gradients, master weights and optimizer states."""
        return sum(self.total(role, place) for role in STATES)

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint.of([*self.sizes.items(), *other.sizes.items()])

    @classmethod
    def of(cls, parts: Iterable[tuple[Key, int]]) -> "Footprint":
        """The sum of ((role, place), bytes) pairs; a pair may come several times."""
        sizes: dict[Key, int] = {}
        for key, size in parts:
            if size:
                sizes[key] = sizes.get(key, 0) + int(size)
        return cls(sizes)

    def rows(self) -> list[tuple[str, str, int]]:
        """(role, place, bytes), roles and places in their own order, those of 0 bytes left out."""
        return [(role, place, self.sizes[role, place]) for role in ROLES for place in PLACES
                if self.sizes.get((role, place))]

    def to_json(self) -> dict[str, dict[str, int]]:
        """{role: {place: bytes}}"""
        result: dict[str, dict[str, int]] = {}
        for role, place, size in self.rows():
            result.setdefault(role, {})[place] = size
        return result

    @classmethod
    def of_json(cls, values: Mapping[str, Mapping[str, Any]]) -> "Footprint":
        """The footprint that `to_json` wrote."""
        return cls.of(((role, place), int(size)) for role, places in values.items() for place, size in places.items())
