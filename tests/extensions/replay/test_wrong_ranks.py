"""Which rank is named, from the checksums that the ranks computed for each other's micro-batches."""

import pytest

from pretrain.extensions.replay.first_micro_batch import Place
from pretrain.extensions.replay.recompute import Finding, RankSums, find_wrong_ranks

PLACES = [Place("forward", "layer 0", "its output"), Place("forward", "layer 1", "its output"),
          Place("backward", "layer 1", "the gradient of its input"),
          Place("backward", "layer 0", "the gradient of 0.weight")]
SHIFTS = (0, 1, 0, 1, 2)  # computations: the training itself, the comparison, then to find out who is wrong


def found(units: int, wrong: dict[tuple[int, int], int], *, tensor: int = 1) -> Finding | None:
    """Let units of `tensor` ranks compute; `wrong`: {(rank, number of the computation): first wrong place}."""
    gathered = []
    for rank in range(units * tensor):
        unit, sums = rank // tensor, []
        for number, shift in enumerate(SHIFTS):
            source, first = (unit - shift) % units, wrong.get((rank, number), len(PLACES))
            sums.append((source, tuple(10 * source + place + 1000 * (place >= first) for place in range(len(PLACES)))))
        gathered.append(RankSums(rank, f"host{rank}", 0, unit, PLACES, sums))
    return find_wrong_ranks(gathered)


def always(rank: int, place: int) -> dict[tuple[int, int], int]:
    return {(rank, number): place for number in range(len(SHIFTS))}


@pytest.mark.parametrize(("units", "wrong", "kind", "ranks", "place"), [
    (3, always(1, 2), "wrong", [1], 2),
    (4, always(0, 0), "wrong", [0], 0),
    (3, {(2, 0): 1}, "flaky", [2], 1),  # once, in the training
    (3, {(2, 1): 3}, "flaky", [2], 3),  # once, with the micro-batch of another rank
    (2, {(1, 0): 1}, "flaky", [1], 1),
    (2, always(1, 3), "undecided", [0, 1], 3),
    (1, {(0, 2): 2}, "flaky", [0], 2),
])
def test_the_wrong_rank_is_named(units: int, wrong: dict[tuple[int, int], int], kind: str, ranks: list[int],
                                 place: int) -> None:
    finding = found(units, wrong)
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.place) == (kind, ranks, PLACES[place]), finding.text
    assert f"rank {ranks[0]} on host{ranks[0]}" in finding.text


def test_of_the_ranks_that_share_layers_the_first_one_that_differs_is_named() -> None:
    """The error of rank 3 reaches rank 2 by a sum over both."""
    finding = found(3, always(3, 1) | always(2, 2), tensor=2)
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.place) == ("wrong", [3], PLACES[1])


def test_equal_results_are_no_finding() -> None:
    assert found(4, {}) is None
