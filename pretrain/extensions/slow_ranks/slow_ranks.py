"""Find the ranks that are slower than their peers, for longer and by more than the spread of their times explains.

All functions are pure: they see only rows of rank_times.jsonl. A rank is compared by its own time, in which it does not
wait for others. Its peers are the ranks of its pipeline stage, which compute the same: the reference is the median of
their times, the lower one of an even number, so that half of the ranks may be slow. Stages differ by design: a stage,
and a rank that is alone in its stage, is compared with its own past and its FLOPs, relative to the other stages.

Times are noisy, the more so on a machine with other programs, and their noise does not average out from step to step.
So rows are joined to blocks of at least BLOCK_S seconds. `statistics.py` has the tests that find slow ranks.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pretrain.extensions.slow_ranks.change import SLOW_RANK, Change, Place, SlowTimes, explain
from pretrain.extensions.slow_ranks.rank_times import RankTimes, mean_times
from pretrain.extensions.slow_ranks.statistics import LONGEST, WINDOW, Excess, excesses, obvious, significant
from pretrain.monitor.noise import change_point

BLOCK_S = 2.0
_LONG = 3  # a block that takes this times as long as usual counts as so many: rows of very slow steps are rare
LEFT_OUT = 2  # first rows of a start, with compilation and warm-up
_MOST_EACH_BLOCK = 64  # ranks that are looked at after each block; with more, every second or later one: it costs time
SMALLEST_COST = 0.05  # fraction of a step that the others wait for the rank


def peers_of(places: Sequence[Place]) -> list[np.ndarray]:
    """Return for each rank those that it is compared with, itself among them: of its stage, or all if it is alone."""
    stages = np.array([place.stage for place in places])
    found = [np.flatnonzero(stages == place.stage) for place in places]
    return [peers if len(peers) > 1 else np.arange(len(places)) for peers in found]


@dataclass
class _Slow:
    """Ranks that were reported."""

    change: Change
    level: float  # log of the ratio
    first_block: int


@dataclass
class Blocks:
    """The newest blocks, and the rows of the next one."""

    seconds: float
    blocks: deque[RankTimes] = field(default_factory=lambda: deque(maxlen=LONGEST))
    rows: list[RankTimes] = field(default_factory=list)
    count: int = 0

    def add(self, times: RankTimes) -> bool:
        """Add a row. Returns whether it completes a block."""
        self.rows.append(times)
        if sum(row.steps * row.step_ms for row in self.rows) < self.seconds * 1e3:
            return False
        block, self.rows = mean_times(self.rows), []
        copies = _LONG if self.blocks and block.steps * block.step_ms >= _LONG * self.usual_ms() else 1
        self.blocks.extend([block] * copies)
        self.count += copies
        return True

    def usual_ms(self) -> float:
        """Return the usual time of a block."""
        return float(np.median([each.steps * each.step_ms for each in self.blocks]))

    def different(self) -> list[int]:
        """Return the indexes of the blocks without the copies of long ones."""
        blocks = list(self.blocks)
        return [index for index, block in enumerate(blocks) if index == 0 or block is not blocks[index - 1]]

    def forget_since(self, step: int) -> None:
        """Remove the blocks of a slow phase that is over: it is no usual spread, and no beginning of the next one."""
        self.blocks = deque((block for block in self.blocks if block.step < step), maxlen=LONGEST)


class SlowRanks:
    """Looks at each row, and reports ranks that have become slow, or are no longer slow.

    Args:
        on_cpu: the ranks compute on CPUs.
        stage_work: what each pipeline stage computes, in any unit; (): unknown.
        block_s: seconds of training that are joined to one block.
    """

    def __init__(self, places: Sequence[Place], *, on_cpu: bool = True, stage_work: Sequence[float] = (),
                 block_s: float = BLOCK_S) -> None:
        self._places, self._on_cpu = list(places), on_cpu
        self._blocks = Blocks(block_s)
        self._left_out = LEFT_OUT
        self._every = -(-len(self._places) // _MOST_EACH_BLOCK)
        self._slow: list[_Slow] = []
        stages = np.array([place.stage for place in places])
        self._stage_ranks = [np.flatnonzero(stages == stage) for stage in range(int(stages.max()) + 1)]
        self._work = list(stage_work)
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
        if not self._blocks.add(times) or self._blocks.count % self._every:
            return []
        excess = excesses(np.array([block.ms["own"] for block in self._blocks.blocks]), self._stage_ranks, self._work,
                          slow={slow.change.stage for slow in self._slow if slow.change.stage is not None})
        return self._ended(excess) or self._begun(excess, math.log(max(imbalance, 1.0)))

    def _begun(self, excess: Excess, imbalance: float) -> list[Change]:
        known = {rank for slow in self._slow for rank in slow.change.ranks}
        rows, found = self._blocks.different(), dict[int, float]()  # rank -> log of the ratio
        seconds = max(self._blocks.usual_ms() / 1e3, self._blocks.seconds)

        def above(values: np.ndarray) -> list[tuple[int, float]]:
            return [*obvious(values[rows], seconds, imbalance), *significant(values, imbalance)]

        for stage, level in above(excess.stages):
            found |= dict.fromkeys(self._stage_ranks[stage].tolist(), level)
        for group in self._peer_groups:
            for column, level in above(excess.ranks[:, group]):
                found.setdefault(int(group[column]), level)
        self._add_rest_of_hosts(found, excess)
        new = [rank for rank in sorted(found) if rank not in known and self._costs(rank, found[rank])]
        return [self._report(group, found, excess) for group in self._groups(new)]

    def _add_rest_of_hosts(self, found: dict[int, float], excess: Excess) -> None:
        """Add the other ranks of a host if all are nearly as slow: not all become significant with the same block."""
        newest = np.median(excess.ranks[-WINDOW:], axis=0)
        for host in {self._places[rank].host for rank in found}:
            on_host = [rank for rank, place in enumerate(self._places) if place.host == host]
            level = min(found[rank] for rank in on_host if rank in found)
            rest = [rank for rank in on_host if rank not in found]
            if all(newest[rank] > 0.6 * level for rank in rest):
                found.update({rank: float(newest[rank]) for rank in rest})

    def _costs(self, rank: int, level: float) -> bool:
        """Return whether the others wait for the rank for a part of the step that is worth a report."""
        newest = list(self._blocks.blocks)[-WINDOW:]
        own = float(np.median([block.ms["own"][rank] for block in newest]))
        step = float(np.median([block.step_ms for block in newest]))
        return own * (1 - math.exp(-level)) > SMALLEST_COST * step

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

    def _report(self, ranks: list[int], found: Mapping[int, float], excess: Excess) -> Change:
        level = float(np.median([found[rank] for rank in ranks]))
        rows = list(self._blocks.blocks)
        stage = self._places[ranks[0]].stage
        is_stage = len(self._stage_ranks) > 1 and ranks == self._stage_ranks[stage].tolist()
        values = excess.stages[:, stage] if is_stage and len(ranks) > 1 else np.median(excess.ranks[:, ranks], axis=1)
        first = change_point(values, WINDOW)
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
                  by_past: bool) -> SlowTimes:
        """Compare the times of the ranks since the change with those of their peers, or with their own before it."""
        def medians(of: Sequence[RankTimes]) -> dict[str, np.ndarray]:
            return {key: np.median([{**row.ms, **row.load}[key] for row in of], axis=0)
                    for key in (*of[0].ms, *of[0].load)}

        now = medians(rows)
        slow = {key: float(np.median(values[ranks])) for key, values in now.items()}
        if by_past and before:
            return SlowTimes(slow, {key: float(np.median(values[ranks])) for key, values in medians(before).items()},
                            self._on_cpu)
        stage = self._stage_ranks[self._places[ranks[0]].stage]
        others = np.setdiff1d(stage, ranks) if len(stage) > len(ranks) else np.setdiff1d(np.arange(len(self._places)),
                                                                                         ranks)
        return SlowTimes(slow, {key: float(np.median(values[others])) for key, values in now.items()}, self._on_cpu)

    def _ended(self, excess: Excess) -> list[Change]:
        """Return the reports of ranks whose newest blocks are no longer slow."""
        ended = []
        for slow in self._slow:
            change = slow.change
            age = min(self._blocks.count - slow.first_block, len(excess.ranks))
            by_stage = change.stage is not None and len(change.ranks) > 1
            values = excess.stages[:, change.stage] if by_stage else np.median(excess.ranks[:, change.ranks], axis=1)
            if age >= WINDOW and np.median(values[-WINDOW:]) < 0.5 * min(slow.level, 1.0):
                ended.append(slow)
        step = self._blocks.blocks[-1].step
        for slow in ended:
            self._slow.remove(slow)
            self._blocks.forget_since(slow.change.since)
        return [slow.change.ended(step) for slow in ended]
