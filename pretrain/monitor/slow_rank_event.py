"""What is reported about slow ranks: an event and a line of text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pretrain.errors import named
from pretrain.monitor.slow_kinds import LINK

SLOW_RANK = "slow_rank"  # the events
SLOW_RANK_OVER = "slow_rank_over"


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

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
    ratio: float  # of the own times, relative to the reference
    since: int  # step of the first row that shows it
    step: int  # of the newest row
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
