"""Settings of recomputation: plain values, without torch."""

from dataclasses import dataclass

PARTS = ("none", "blocks", "attention", "mlp")  # choices of --recompute


@dataclass(frozen=True)
class Recompute:
    """Choice of the activations that the backward pass recomputes, and of the memory that keeps their inputs.

    `part` and `interval` exclude each other (config/run_rules.py).
    """

    part: str = "none"  # one of PARTS: what is recomputed of a block; "blocks": all of it
    every: int = 1  # the part is recomputed in every N-th block: 0, N, 2 * N ...
    interval: int = 0  # number of layers in a recomputed group, which keeps its first layer's input; 0: no groups
    offload: bool = False  # the inputs of recomputed blocks and groups are kept in host memory
    mlp_tiles: int = 1  # pieces of the sequences in which each MLP is computed, and recomputed

    def part_of(self, block: int) -> str:
        """Return the part of a block (index from 0) that is recomputed by itself."""
        return self.part if block % self.every == 0 else "none"

    @property
    def is_on(self) -> bool:
        """Return whether anything is recomputed."""
        return self.part != "none" or self.interval > 0
