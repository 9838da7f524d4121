"""Find the ranks that are slower than their peers, for longer and by more than the spread of their times explains.

All functions are pure: they see only rows of rank_times.jsonl. A rank is compared by its own time, in which it does not
wait for others. Its peers are the ranks of its pipeline stage, which compute the same: the reference is the median of
their times, the lower one of an even number, so that half of the ranks may be slow. Stages differ by design: a stage,
and a rank that is alone in its stage, is compared with its own past, relative to the other stages.

Times are noisy, the more so on a machine with other programs, and their noise does not average out from step to step.
Rows are joined to blocks of at least BLOCK_S seconds. The median of the newest 8, 16 or 32 blocks is compared with the
spread of the blocks, and with the lasting differences between the ranks that are not slow.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pretrain.errors import named
from pretrain.monitor.rank_times import RankTimes, mean_times
from pretrain.monitor.slow_kinds import Evidence, explain

SLOW_RANK = "slow_rank"  # the events
SLOW_RANK_OVER = "slow_rank_over"
BLOCK_S = 1.0
_WINDOWS = (8, 16, 32)  # blocks whose median is compared; a short blip does not reach the shortest
_LONGEST = 256  # newest blocks that are kept
_LEFT_OUT = 2  # first rows of a start, with compilation and warm-up
# spreads of blocks that the median of a window must exceed: noise that lasts for some blocks, as on a busy
# machine, moves the median of 8 blocks nearly as much as one block
_LIMITS = {8: 4.0, 16: 3.2, 32: 2.5}
_FEWEST_BLOCKS = 24  # before the first report
_MOST_EACH_BLOCK = 64  # ranks that are looked at after each block; with more, every second or later one: it costs time
_SMALLEST_RATIO = math.log(1.1)
_SMALLEST_COST = 0.05  # of a step, that the others wait for the rank


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

    def __str__(self) -> str:
        who = _names(self.ranks, self.hosts, self.stage, whole_hosts=self.whole_hosts)
        if self.event == SLOW_RANK_OVER:
            return f"{who} as fast as the others again, after {self.steps} steps"
        return (f"{who} {self.ratio:.2f} times as slow as the others since about step {self.since}; likely kind: "
                f"{self.kind} ({self.evidence})")


def _names(ranks: Sequence[int], hosts: Sequence[str], stage: int | None, *, whole_hosts: bool) -> str:
    which, where = named("rank", ranks), named("host", hosts)
    if stage is not None:
        return f"pipeline stage {stage} ({which}, {where}) is"
    if whole_hosts:
        return f"{where} ({which}) {'are' if len(hosts) > 1 else 'is'}"
    return f"{which} ({where}) {'are' if len(ranks) > 1 else 'is'}"


def peers_of(places: Sequence[Place]) -> list[np.ndarray]:
    """Return for each rank those that it is compared with, itself among them: of its stage, or all if it is alone."""
    stages = np.array([place.stage for place in places])
    found = [np.flatnonzero(stages == place.stage) for place in places]
    return [peers if len(peers) > 1 else np.arange(len(places)) for peers in found]


def lower_median(values: np.ndarray) -> np.ndarray:
    """Return the median of the last axis; of an even number of values, the lower one in the middle."""
    middle = (values.shape[-1] - 1) // 2
    result: np.ndarray = np.partition(values, middle, axis=-1)[..., middle]
    return result


@dataclass
class _Slow:
    """Ranks that were reported."""

    change: Change
    level: float  # log of the ratio
    first_block: int


@dataclass
class _Blocks:
    """The newest blocks, and the rows of the next one."""

    seconds: float
    blocks: deque[RankTimes] = field(default_factory=lambda: deque(maxlen=_LONGEST))
    rows: list[RankTimes] = field(default_factory=list)
    count: int = 0

    def add(self, times: RankTimes) -> bool:
        """Add a row. Returns whether it completes a block."""
        self.rows.append(times)
        if sum(row.steps * row.step_ms for row in self.rows) < self.seconds * 1e3:
            return False
        self.blocks.append(mean_times(self.rows))
        self.rows, self.count = [], self.count + 1
        return True


class SlowRanks:
    """Looks at each row, and reports ranks that have become slow, or are no longer slow.

    Args:
        block_s: seconds of training that are joined to one block.
        on_cpu: the ranks compute on CPUs.
    """

    def __init__(self, places: Sequence[Place], *, block_s: float = BLOCK_S, on_cpu: bool = True) -> None:
        self._places, self._on_cpu = list(places), on_cpu
        self._blocks = _Blocks(block_s)
        self._left_out = _LEFT_OUT
        self._every = -(-len(self._places) // _MOST_EACH_BLOCK)
        self._slow: list[_Slow] = []
        self._returns = np.zeros(len(self._places), dtype=int)  # by rank: after each one, slowness must last longer
        stages = np.array([place.stage for place in places])
        self._stage_ranks = [np.flatnonzero(stages == stage) for stage in range(int(stages.max()) + 1)]
        self._peer_groups = [ranks for ranks in self._stage_ranks if len(ranks) > 1]

    def leave_out_next(self) -> None:
        """Leave the next row out: it has more than steps of training, or few of them."""
        self._left_out = max(self._left_out, 1)

    def observe(self, times: RankTimes, *, imbalance: float = 1.0) -> list[Change]:
        """Add a row. Returns what is to be reported.

        Args:
            imbalance: by which ratio ranks may differ in what they compute: the load of their experts.
        """
        if self._left_out or not np.isfinite(times.ms["own"]).all() or times.step_ms <= 0:
            self._left_out = max(self._left_out - 1, 0)
            return []
        if not self._blocks.add(times) or self._blocks.count < _FEWEST_BLOCKS or self._blocks.count % self._every:
            return []
        excess = excesses(np.array([block.ms["own"] for block in self._blocks.blocks]), self._stage_ranks)
        return [*self._ended(excess), *self._begun(excess, math.log(max(imbalance, 1.0)))]

    def _begun(self, excess: "Excess", imbalance: float) -> list[Change]:
        known = {rank for slow in self._slow for rank in slow.change.ranks}
        found: dict[int, tuple[float, int]] = {}  # rank -> (level, blocks)
        for window in _WINDOWS:
            for stage, level in significant(excess.stages, window, imbalance):
                for rank in self._stage_ranks[stage].tolist():
                    found.setdefault(rank, (level, window))
            for group in self._peer_groups:
                for column, level in significant(excess.ranks[:, group], window, imbalance):
                    rank = int(group[column])
                    if window >= _WINDOWS[0] * 2 ** min(self._returns[rank], 2):
                        found.setdefault(rank, (level, window))
        self._add_rest_of_hosts(found, excess)
        new = [rank for rank in sorted(found) if rank not in known and self._costs(rank, *found[rank])]
        return [self._report(group, found, excess) for group in self._groups(new)]

    def _add_rest_of_hosts(self, found: dict[int, tuple[float, int]], excess: "Excess") -> None:
        """Add the other ranks of a host if all are nearly as slow: not all become significant with the same block."""
        newest = np.median(excess.ranks[-_WINDOWS[0]:], axis=0)
        for host in {self._places[rank].host for rank in found}:
            on_host = [rank for rank, place in enumerate(self._places) if place.host == host]
            known = [rank for rank in on_host if rank in found]
            level, window = min(found[rank] for rank in known)
            if all(newest[rank] > 0.6 * level for rank in on_host if rank not in found):
                found.update({rank: (float(newest[rank]), window) for rank in on_host if rank not in found})

    def _costs(self, rank: int, level: float, window: int) -> bool:
        """Return whether the others wait for the rank for a part of the step that is worth a report."""
        newest = list(self._blocks.blocks)[-window:]
        own = float(np.median([block.ms["own"][rank] for block in newest]))
        step = float(np.median([block.step_ms for block in newest]))
        return own * (1 - math.exp(-level)) > _SMALLEST_COST * step

    def _groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks of each host whose ranks are all slow, or of a stage, and the others one by one."""
        rest, groups = set(ranks), []
        for members in self._stage_ranks if len(self._stage_ranks) > 1 else []:
            if len(members) > 1 and rest.issuperset(members.tolist()):
                groups.append(sorted(members.tolist()))
                rest -= set(groups[-1])
        for host in sorted({self._places[rank].host for rank in rest}):
            on_host = [rank for rank, place in enumerate(self._places) if place.host == host]
            slow = sorted(rest.intersection(on_host))
            groups += [slow] if len(slow) == len(on_host) else [[rank] for rank in slow]
        return groups

    def _report(self, ranks: list[int], found: Mapping[int, tuple[float, int]], excess: "Excess") -> Change:
        level, window = float(np.median([found[rank][0] for rank in ranks])), found[ranks[0]][1]
        rows = list(self._blocks.blocks)
        stage = self._places[ranks[0]].stage
        is_stage = len(self._stage_ranks) > 1 and ranks == self._stage_ranks[stage].tolist()
        values = excess.stages[:, stage] if is_stage and len(ranks) > 1 else np.median(excess.ranks[:, ranks], axis=1)
        first = change_point(values, window)
        evidence = self._evidence(ranks, rows[first:], rows[:first], by_past=is_stage)
        kind, text = explain(evidence)
        hosts = sorted({self._places[rank].host for rank in ranks})
        whole = len(hosts) < len({place.host for place in self._places}) and \
            [rank for rank, place in enumerate(self._places) if place.host in hosts] == ranks
        since = rows[first].step - rows[first].steps + 1
        change = Change(SLOW_RANK, ranks, hosts, stage if is_stage else None, whole, kind, math.exp(level), since,
                        rows[-1].step, rows[-1].step - since + 1, text)
        self._slow.append(_Slow(change, level, self._blocks.count - (len(rows) - first)))
        return change

    def _evidence(self, ranks: list[int], rows: Sequence[RankTimes], before: Sequence[RankTimes], *,
                  by_past: bool) -> Evidence:
        """Compare the times of the ranks since the change with those of their peers, or with their own before it."""
        def medians(of: Sequence[RankTimes]) -> dict[str, np.ndarray]:
            return {key: np.median([{**row.ms, **row.load}[key] for row in of], axis=0)
                    for key in (*of[0].ms, *of[0].load)}

        now = medians(rows)
        slow = {key: float(np.median(values[ranks])) for key, values in now.items()}
        if by_past and before:
            return Evidence(slow, {key: float(np.median(values[ranks])) for key, values in medians(before).items()},
                            self._on_cpu)
        stage = self._stage_ranks[self._places[ranks[0]].stage]
        others = np.setdiff1d(stage, ranks) if len(stage) > len(ranks) else np.setdiff1d(np.arange(len(self._places)),
                                                                                         ranks)
        return Evidence(slow, {key: float(np.median(values[others])) for key, values in now.items()}, self._on_cpu)

    def _ended(self, excess: "Excess") -> list[Change]:
        """Return the reports of ranks whose newest blocks are no longer slow."""
        ended = []
        for slow in self._slow:
            change = slow.change
            age = min(self._blocks.count - slow.first_block, len(excess.ranks))
            by_stage = change.stage is not None and len(change.ranks) > 1
            values = excess.stages[:, change.stage] if by_stage else np.median(excess.ranks[:, change.ranks], axis=1)
            if age >= 2 * _WINDOWS[0] and np.median(values[-_WINDOWS[0]:]) < 0.5 * min(slow.level, 1.0):
                ended.append(slow)
        for slow in ended:
            self._slow.remove(slow)
            self._returns[slow.change.ranks] += 1
        step = self._blocks.blocks[-1].step
        return [Change(**{**vars(slow.change), "event": SLOW_RANK_OVER, "step": step,
                          "steps": step - slow.change.since + 1}) for slow in ended]


@dataclass(frozen=True)
class Excess:
    """Logarithms of own times, relative to the reference: 0 is as fast as the others."""

    ranks: np.ndarray  # [blocks, ranks]
    stages: np.ndarray  # [blocks, pipeline stages]; 0 if there is one


def excesses(own: np.ndarray, stage_ranks: Sequence[np.ndarray]) -> Excess:
    """Return the excess of each rank and stage. `own`: [blocks, ranks]; `stage_ranks`: the ranks of each stage."""
    logs = np.log(np.maximum(own, 1e-6))
    by_rank, by_stage = np.zeros_like(logs), np.zeros((len(logs), len(stage_ranks)))
    for stage, ranks in enumerate(stage_ranks):
        by_stage[:, stage] = lower_median(logs[:, ranks])
        if len(ranks) > 1:
            by_rank[:, ranks] = _relative(logs[:, ranks])
    if len(stage_ranks) == 1:
        return Excess(by_rank, np.zeros_like(by_stage))
    # the earliest blocks show how the stages differ by design; the newest ones may be slow
    past = np.median(by_stage[:max(len(logs) - _WINDOWS[0], _WINDOWS[0])][:_LONGEST // 4], axis=0)
    by_stage = _relative(by_stage - past)
    for stage, ranks in enumerate(stage_ranks):
        if len(ranks) == 1:
            by_rank[:, ranks[0]] = by_stage[:, stage]
    return Excess(by_rank, by_stage)


def _relative(logs: np.ndarray) -> np.ndarray:
    """Return the difference of each column from the lower median of the others, by row."""
    ordered, middle = np.sort(logs, axis=1), (logs.shape[1] - 2) // 2
    return logs - np.where(logs <= ordered[:, [middle]], ordered[:, [middle + 1]], ordered[:, [middle]])


def significant(excess: np.ndarray, window: int, imbalance: float = 0.0) -> list[tuple[int, float]]:
    """Return the columns whose newest `window` blocks are significantly above 0, each with their median.

    Args:
        excess: [blocks, columns].
        imbalance: logarithm of the ratio that is no sign of a slow rank.
    """
    fewest = _FEWEST_BLOCKS * (1 if excess.shape[1] > 2 else 2)  # of two columns, only time shows the spread
    if len(excess) < max(window, fewest) or not excess.any():
        return []
    blocks, newest = excess[-window:], np.median(excess[-_WINDOWS[0]:], axis=0)
    levels = np.median(blocks, axis=0)
    limits = np.hypot(_LIMITS[window] * _spread(excess, window), _LIMITS[max(_WINDOWS)] * _offsets(excess))
    limits *= 1 + 0.1 * math.log(max(excess.shape[1] / 4, 1))  # the largest noise of many columns is larger
    limits = np.maximum(limits, _SMALLEST_RATIO) + imbalance
    lasting = ((blocks > 0.5 * levels).mean(axis=0) >= 0.75) & (newest > 0.7 * levels)
    return [(int(column), float(levels[column])) for column in np.flatnonzero((levels > limits) & lasting)]


def _spread(excess: np.ndarray, window: int) -> np.ndarray:
    """Return the spread of blocks, by column: that of most columns, or its own before the newest window if larger.

    Few blocks in a row, whose noise lasts, show less than the spread of many.
    """
    def of(blocks: np.ndarray) -> np.ndarray:
        deviation: np.ndarray = 1.4826 * np.median(np.abs(blocks - np.median(blocks, axis=0)), axis=0)
        return deviation * (1 + _WINDOWS[0] / len(blocks))

    everyone = of(excess)
    if excess.shape[1] > 2:
        everyone = np.full_like(everyone, np.median(everyone))
    earlier = excess[:-window]
    return np.maximum(everyone, of(earlier)) if len(earlier) >= _WINDOWS[0] else everyone


def _offsets(excess: np.ndarray) -> float:
    """Return the lasting differences of the columns that are not slow: slow ones lie above the reference."""
    medians = np.median(excess, axis=0)
    below = medians - lower_median(medians)
    below = below[below < 0]
    return float(np.sqrt(np.mean(below ** 2))) if below.size and excess.shape[1] > 2 else 0.0


def change_point(values: np.ndarray, window: int) -> int:
    """Return from which value on a noisy column has about the level of its newest `window` values, which is above 0.

    It is the first of the newest values whose sum lies farthest above half of this level.
    """
    sums = np.cumsum((values - 0.5 * np.median(values[-window:]))[::-1])
    return len(values) - 1 - int(np.argmax(sums))
