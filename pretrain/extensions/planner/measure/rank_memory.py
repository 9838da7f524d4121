"""RankMemory: what a measurement or a simulation finds on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.memory.footprint import Footprint


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
        held = Footprint.of(((role, location), int(size)) for role, sizes in values["held"].items()
                            for location, size in sizes.items())
        return cls(**{**values, "held": held})
