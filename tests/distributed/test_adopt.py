"""Runs of other programs continue here with the losses that they would have had, in their own layout and in others.

The programs are real: tests/distributed/workers/adopt_worker.py. `python -m tests.support.adopted` writes the table.
"""

from collections.abc import Sequence

import pytest

from tests.support.adopted import ALL, QUICK, TOLERANCES, Original, measure

Differences = dict[tuple[str, str], float]


@pytest.fixture(scope="module", params=[QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["", "all"])
def measured(corpus: str, tmp_path_factory: pytest.TempPathFactory,
             request: pytest.FixtureRequest) -> tuple[Sequence[Original], Differences]:
    return request.param, measure(request.param, corpus, tmp_path_factory.mktemp("adopted"))


def test_losses_are_those_of_the_original(measured: tuple[Sequence[Original], Differences]) -> None:
    originals, differences = measured
    assert len(differences) >= 3 * len(QUICK)
    wrong = {key: value for each in originals for key, value in differences.items()
             if key[0] == each.name and value > TOLERANCES[each.precision]}
    assert wrong == {}
