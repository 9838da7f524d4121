"""Bytes of one rank by role (what the bytes are for) and location (which memory holds them), and bytes as text.

Estimates and inventories of engines are a Footprint, so that they can be compared role by role.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pretrain.errors import counted, format_number

GIB = 2**30
GB = 10**9
UNITS = ("GiB", "GB", "MiB")  # choices of --unit
_UNIT_BYTES = {"MiB": 2**20, "GiB": GIB, "GB": GB, "TB": 1000 * GB}
STORAGE_RATE = 2e9  # bytes a second that one node writes to the checkpoints' storage: an assumption
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


def checkpoint_text(size_bytes: int, nodes: int, storage_rate: float = STORAGE_RATE) -> str:
    """Describe the size of a checkpoint, and the time that all nodes together write it, in one sentence."""
    unit, size = next(((unit, size) for unit, size in (("TB", 1e12), ("GB", 1e9)) if size_bytes >= size), ("MB", 1e6))
    seconds = size_bytes / nodes / storage_rate
    return f"a checkpoint has {format_number(size_bytes / size)} {unit} and takes {format_number(seconds)} s at " \
           f"{storage_rate / GB:g} GB/s a node, {counted(nodes, 'node')}"
