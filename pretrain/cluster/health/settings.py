"""Settings of the cluster health check."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.config.flags.arguments import RunArguments


@dataclass(frozen=True)
class ClusterCheckSettings:
    """What is measured, and how much of it. None: the default of the device."""

    folder: Path = Path(".")  # folder whose disk is measured
    run: RunArguments | None = None  # run to validate; its checkpoint must fit on the disk
    product_size: int | None = None  # rows and columns of the multiplied matrices
    memory_bytes: int | None = None  # filled on each device
    message_bytes: int | None = None  # size of a transfer
    disk_bytes: int = 2**28  # written on each host
    rounds: int = 32  # rounds of host pairs; 0: every pair
    timeout_s: float = 60.0  # of each measurement; the ranks may join within twice that
    min_ratio: float | None = None  # replaces the min_ratio of every measure
    min_gbit_per_s: float = 0.0  # required of each link; 0: no requirement
    max_clock_skew_s: float = 1.0
