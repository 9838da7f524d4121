"""Settings of the cluster health check."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.config.flags.arguments import RunArguments


@dataclass(frozen=True)
class ClusterCheckSettings:
    """Sizes, limits and thresholds of the check. For sizes, None means the default of the device."""

    folder: Path = Path(".")  # folder whose disk is measured
    run: RunArguments | None = None  # run to validate; its checkpoint must fit on the disk
    product_size: int | None = None  # rows and columns of the multiplied matrices
    memory_bytes: int | None = None  # memory that is filled on each device
    message_bytes: int | None = None  # size of a transfer
    disk_bytes: int = 2**28  # bytes that each host writes
    rounds: int = 32  # rounds of host pairs that are measured; 0: all rounds, so every pair
    timeout_s: float = 60.0  # time-out of each measurement; ranks may start within twice this time
    min_ratio: float | None = None  # replaces the min_ratio of every measure; None: keep them
    min_gbit_per_s: float = 0.0  # rate that every link must reach; 0: no requirement
    max_clock_skew_s: float = 1.0  # largest allowed difference of a clock from the median clock
