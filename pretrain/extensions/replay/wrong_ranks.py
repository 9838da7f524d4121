"""Decide which rank computed wrongly, from checksums of micro-batches that several ranks computed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.extensions.replay.first_micro_batch import BACKWARD, Place
from pretrain.resilience.replicas import list_ranks

FLAKY, WRONG, UNDECIDED = "flaky", "wrong", "undecided"
Sums = tuple[int, ...]


@dataclass(frozen=True)
class RankSums:
    """The checksums of one rank."""

    rank: int
    host: str
    stage: int  # pipeline stage
    unit: int  # number of the group of ranks that computes a micro-batch together, in the ring of these groups
    places: Sequence[Place]
    sums: Sequence[tuple[int, Sums]]  # (unit whose micro-batch it was, checksums) of each computation


@dataclass(frozen=True)
class Finding:
    """What the checksums show."""

    kind: str  # FLAKY: a rank disagrees with itself. WRONG: the majority differs. UNDECIDED: no majority
    ranks: list[int]
    place: Place  # the first one that differs
    text: str


@dataclass(frozen=True)
class _Results:
    """The results of a unit for one micro-batch: of each computation, the checksums of its ranks in rank order."""

    ranks: list[RankSums]
    outcomes: list[tuple[Sums, ...]]


def find_wrong_ranks(gathered: Sequence[RankSums]) -> Finding | None:
    """Return what differs, or None. A rank that disagrees with itself is named before others."""
    found = [finding for stage in sorted({each.stage for each in gathered})
             for source in sorted({each.unit for each in gathered if each.stage == stage})
             if (finding := _compare([each for each in gathered if each.stage == stage], source)) is not None]
    return min(found, key=lambda finding: (FLAKY, WRONG, UNDECIDED).index(finding.kind), default=None)


def _compare(gathered: Sequence[RankSums], source: int) -> Finding | None:
    """Compare all computations of the micro-batch of unit `source`, in one pipeline stage."""
    results = {unit: _results_of([each for each in gathered if each.unit == unit], source)
               for unit in sorted({each.unit for each in gathered})}
    results = {unit: each for unit, each in results.items() if each.outcomes}
    hosts = {each.rank: each.host for each in gathered}
    for each in results.values():
        other = next((outcome for outcome in each.outcomes if outcome != each.outcomes[0]), None)
        if other is not None:
            ranks, place = _first_difference(each.ranks, each.outcomes[0], other)
            return Finding(FLAKY, ranks, place, f"{list_ranks(ranks, hosts)} computed the same micro-batch twice with "
                           f"different results, first in {_describe(place)}")
    votes = Counter(each.outcomes[0] for each in results.values())
    if len(votes) < 2:
        return None
    (right, count), (_, next_count) = votes.most_common(2)
    wrong = [each for each in results.values() if each.outcomes[0] != right]
    ranks, place = _first_difference(wrong[0].ranks, wrong[0].outcomes[0], right)
    if count > next_count:
        return Finding(WRONG, ranks, place, f"{list_ranks(ranks, hosts)} computed a micro-batch with another result "
                       f"than {count} others, which agree: first in {_describe(place)}")
    ranks = sorted(rank.rank for each in results.values() for rank in each.ranks)
    return Finding(UNDECIDED, ranks, place, f"{list_ranks(ranks, hosts)} computed the same micro-batch with different "
                   f"results, first in {_describe(place)}; each repeats its own, so that one of them computes wrongly "
                   "each time, and only a third data-parallel rank could decide which")


def _results_of(ranks: Sequence[RankSums], source: int) -> _Results:
    by_rank = [[sums for unit, sums in each.sums if unit == source] for each in sorted(ranks, key=lambda x: x.rank)]
    return _Results(sorted(ranks, key=lambda each: each.rank), list(zip(*by_rank, strict=True)))


def _first_difference(ranks: Sequence[RankSums], found: Iterable[Sums],
                      expected: Iterable[Sums]) -> tuple[list[int], Place]:
    """Return the place that differs first, and the ranks of the unit whose checksums differ there."""
    first = {each.rank: min((index for index, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]),
                            default=len(a))
             for each, a, b in zip(ranks, found, expected, strict=True)}
    index = min(first.values())
    return [rank for rank, at in first.items() if at == index], ranks[0].places[index]


def _describe(place: Place) -> str:
    direction = "backward" if place.direction == BACKWARD else "forward"
    return f"the {direction} pass of {place.layer}, in {place.value}"
