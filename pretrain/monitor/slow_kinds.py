"""The likely kind of a slow rank, from what its host counted for the thread that trains, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass

DATA, DISK, COMPUTE, OTHER_LOAD, THROTTLING, STOPPED, LINK, UNKNOWN = (
    "data", "slow disk", "compute", "other load", "throttling", "stopped", "network link", "unknown")
# kind -> what to do
REMEDIES = {
    DATA: "look at the storage of its data", DISK: "look at the storage of its data",
    COMPUTE: "compare its clocks, power limit and number of threads with another host",
    OTHER_LOAD: "end the other programs on the host (`top`, `nvidia-smi`)",
    THROTTLING: "look at temperatures, power limits, and the CPU limit of its container",
    STOPPED: "find out who stops the process (SIGSTOP, a debugger, a frozen virtual machine)",
    LINK: "look at its network interface, cable and switch (`ds-pretrain check-cluster` measures all links)",
    UNKNOWN: "look at the machine"}
_MOST = 0.5  # of the additional time, that a cause must explain


@dataclass(frozen=True)
class Evidence:
    """Keys of rank_times.TIMES and LOAD, of a step: of the slow ranks, and of the ranks that they are compared with."""

    slow: Mapping[str, float]
    others: Mapping[str, float]
    on_cpu: bool = True  # the own time is that of the thread that trains, and not of a device

    def more(self, key: str) -> float:
        return self.slow[key] - self.others[key]


def explain(evidence: Evidence) -> tuple[str, str]:
    """Return the kind, a key of REMEDIES, and what shows it."""
    own = evidence.more("own")
    cpu, delay, throttled, data = (evidence.more(key) for key in ("cpu", "run_delay", "throttled", "data"))
    # the kernel counts a thread of a throttled group as ready to run
    asleep = own - cpu - max(delay, throttled)
    text = f"own time {evidence.slow['own']:.0f} ms of a step, others {evidence.others['own']:.0f} ms; of the " \
        f"difference, CPU {cpu:+.0f} ms, waiting for a CPU {delay:+.0f} ms, beyond quota {throttled:+.0f} ms, data " \
        f"{data:+.0f} ms"
    if own <= 0:
        return UNKNOWN, text
    if evidence.more("gpu_slowed") >= _MOST:
        return THROTTLING, f"{text}; the GPU runs below its clock because of heat or power"
    if throttled > 0.3 * own:
        return THROTTLING, text
    if delay > _MOST * own:
        return OTHER_LOAD, text
    if data > _MOST * own:
        read = evidence.more("read_bytes")
        return (DISK, f"{text}; it read {read / 2**20:.1f} MiB more from the disk") if read > 2**16 else (DATA, text)
    if not evidence.on_cpu or cpu > _MOST * own:
        return COMPUTE, text
    if asleep > _MOST * own:
        return STOPPED, f"{text}; in most of it, the process did not run and did not wait for the CPU"
    return UNKNOWN, text
