"""Report slow ranks: an event, a line of text, and the likely kind, from what the hosts counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pretrain.active_extensions import advice_on
from pretrain.errors import format_number, named, printable
from pretrain.monitor.read_run_folder import is_number

SLOW_RANK = "slow_rank"  # the events
SLOW_RANK_OVER = "slow_rank_over"
DATA, DISK, COMPUTE, OTHER_LOAD, THROTTLING, STOPPED, LINK, UNKNOWN = (
    "data", "slow disk", "compute", "other load", "throttling", "stopped", "network link", "unknown")
# kind -> what to do
REMEDIES = {
    DATA: "look at the storage of its data", DISK: "look at the storage of its data",
    COMPUTE: "compare its clocks, power limit and number of threads with another host",
    OTHER_LOAD: "end the other programs on the host (`top`, `nvidia-smi`)",
    THROTTLING: "look at temperatures, power limits, and the CPU limit of its container",
    STOPPED: "find out who stops the process (SIGSTOP, a debugger, a frozen virtual machine)",
    LINK: "look at its network interface, cable and switch",
    UNKNOWN: "look at the machine"}
_LEAVE_OUT = "`--exclude_stragglers` leaves the host out at the next start"
_MOST = 0.5  # fraction of the additional time that a cause must explain


@dataclass(frozen=True)
class Place:
    """Host and pipeline stage of a rank."""

    host: str
    stage: int = 0  # pipeline stage


@dataclass(frozen=True)
class Change:
    """Ranks have become slow, or are as fast as the others again."""

    event: str  # SLOW_RANK or SLOW_RANK_OVER
    ranks: list[int]
    hosts: list[str]
    stage: int | None  # pipeline stage, if all of its ranks are slow
    whole_hosts: bool  # all ranks of the hosts are slow
    kind: str
    ratio: float  # ratio of the own times, relative to the reference
    since: int  # step of the first row that shows it
    step: int  # step of the newest row
    steps: int  # that show it
    evidence: str

    def record(self) -> dict[str, Any]:
        """Return the keys of the event besides its name and reason."""
        record = {"step": self.step, "ranks": self.ranks, "hosts": self.hosts, "stage": self.stage, "kind": self.kind,
                  "ratio": round(self.ratio, 3), "since": self.since, "steps": self.steps}
        return record if self.event == SLOW_RANK_OVER else {**record, "evidence": self.evidence}

    def ended(self, step: int) -> "Change":
        """Return the report that the ranks are no longer slow. `step`: of the newest row."""
        return replace(self, event=SLOW_RANK_OVER, step=step, steps=step - self.since + 1)

    def __str__(self) -> str:
        who = _names(self.ranks, self.hosts, self.stage, whole_hosts=self.whole_hosts)
        if self.event == SLOW_RANK_OVER:
            return f"{who} as fast as the others again, after {self.steps} steps"
        if self.kind == LINK:
            return f"{who} behind a slow network link since about step {self.since}: {self.evidence}"
        return (f"{who} {self.ratio:.2f} times as slow as the others since about step {self.since}; likely kind: "
                f"{self.kind} ({self.evidence})")


def _names(ranks: Sequence[int], hosts: Sequence[str], stage: int | None, *, whole_hosts: bool) -> str:
    which, where = named("rank", ranks), named("host", hosts)
    if stage is not None:
        return f"pipeline stage {stage} ({which}, {where}) is"
    if whole_hosts:
        return f"{where} ({which}) {'are' if len(hosts) > 1 else 'is'}"
    return f"{which} ({where}) {'are' if len(ranks) > 1 else 'is'}"


@dataclass(frozen=True)
class SlowTimes:
    """Keys of rank_times.TIMES and LOAD, of a step: of the slow ranks, and of the ranks that they are compared with."""

    slow: Mapping[str, float]
    others: Mapping[str, float]
    on_cpu: bool = True  # the own time is that of the thread that trains, and not of a device

    def more(self, key: str) -> float:
        return self.slow[key] - self.others[key]


def explain(times: SlowTimes) -> tuple[str, str]:
    """Return the kind, a key of REMEDIES, and what shows it."""
    own = times.more("own")
    cpu, delay, throttled, data = (times.more(key) for key in ("cpu", "run_delay", "throttled", "data"))
    # the kernel counts a thread of a throttled group as ready to run
    asleep = own - cpu - max(delay, throttled)
    text = f"own time {times.slow['own']:.0f} ms of a step, others {times.others['own']:.0f} ms; of the " \
        f"difference, CPU {cpu:+.0f} ms, waiting for a CPU {delay:+.0f} ms, beyond quota {throttled:+.0f} ms, data " \
        f"{data:+.0f} ms"
    if own <= 0:
        return UNKNOWN, text
    if times.more("gpu_slowed") >= _MOST:
        return THROTTLING, f"{text}; the GPU runs below its clock because of heat or power"
    if throttled > 0.3 * own:
        return THROTTLING, text
    if delay > _MOST * own:
        return OTHER_LOAD, text
    if data > _MOST * own:
        read = times.more("read_bytes")
        return (DISK, f"{text}; it read {read / 2**20:.1f} MiB more from the disk") if read > 2**16 else (DATA, text)
    if not times.on_cpu or cpu > _MOST * own:
        return COMPUTE, text
    if asleep > _MOST * own:
        return STOPPED, f"{text}; in most of it, the process did not run and did not wait for the CPU"
    return UNKNOWN, text


def problem(event: Mapping[str, Any], machine: str, *, is_over: bool) -> tuple[str, str, str]:
    """Return what an event says about `machine`, what to do, and what shows it. It comes from a file."""
    ratio, kind, stage = event.get("ratio"), event.get("kind"), event.get("stage")
    times = f": {format_number(ratio)} times the others" if is_number(ratio) else ""
    cause = f", probably {printable(kind)}" if isinstance(kind, str) and kind else ""
    where = f", pipeline stage {stage}" if isinstance(stage, int) else ""
    text = f"{machine or 'a rank'} {'was' if is_over else 'is'} slow{times}{where}{cause}"
    tests = advice_on("network") if kind == LINK else []
    advice = "; ".join([REMEDIES.get(str(kind), REMEDIES[UNKNOWN]), *tests, _LEAVE_OUT])
    return text, advice, printable(str(event.get("evidence") or ""))
