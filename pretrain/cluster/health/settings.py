"""What is measured, and how much of it."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.config.arguments import RunArguments


@dataclass(frozen=True)
class Settings:
    """None: as suits the device."""

    folder: Path = Path(".")  # whose disk is measured
    run: RunArguments | None = None  # whose checkpoint must fit there
    product_size: int | None = None  # rows of the matrices
    memory_bytes: int | None = None  # filled on each device
    message_bytes: int | None = None  # of a transfer
    disk_bytes: int = 2**28  # written on each host
    rounds: int = 32  # of pairs of hosts; 0: as many as there are
    timeout_s: float = 60.0  # of each measurement; twice that until all have come
    min_ratio: float | None = None  # in place of each measure's own
    min_gbit_per_s: float = 0.0  # each link must have; 0: nothing but the comparison
    max_clock_skew_s: float = 1.0
