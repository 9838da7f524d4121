"""Checkpoints with the names of torchtitan and Megatron Core, saved by torch on 2 ranks with FSDP2, continue here.

The program is workers/dcp_worker.py. `python -m tests.extensions.adopt.adopted_dcp` measures torchtitan and Megatron
Core themselves, where they are installed.
"""

from collections.abc import Sequence

import pytest

from tests.extensions.adopt.adopted import TOLERANCES, Original, measure
from tests.extensions.adopt.adopted_dcp import ALL, QUICK


@pytest.mark.parametrize("originals", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["", "all"])
def test_losses_are_those_of_the_original(originals: Sequence[Original], corpus: str,
                                          tmp_path_factory: pytest.TempPathFactory) -> None:
    differences = measure(originals, corpus, tmp_path_factory.mktemp("adopted_dcp"))
    assert len(differences) == 3 * len(originals)
    wrong = {key: value for each in originals for key, value in differences.items()
             if key[0] == each.name and not value <= TOLERANCES[each.precision]}
    assert wrong == {}
