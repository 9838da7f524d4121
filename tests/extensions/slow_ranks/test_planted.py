"""A rank of a real run whose reads of data are slow has the most time of its own; the others wait for it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pretrain.monitor.read_run_folder import read_metrics
from tests.extensions.slow_ranks.plant import EXPECTED, LAYOUTS, PLANTS, Ranks, plant, rows_of, slow_reads

SLOW, HEALTHY_ROWS, ROWS = 2, 5, 10
SLOW_READS_S = 0.5  # ten times the time of a step


def test_the_others_wait_for_a_slow_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "zero1", log_interval=1, environ={
        "SLOW_READS_RANK": str(SLOW), "SLOW_READS_FILE": str(tmp_path / "slow"), "SLOW_READS_S": str(SLOW_READS_S)})
    try:
        ranks.wait_for_rows(HEALTHY_ROWS)
        with slow_reads(ranks, SLOW):
            ranks.wait_for_rows(HEALTHY_ROWS + ROWS)
        ranks.stop_after(0)
    finally:
        ranks.kill()
    assert [process.returncode for process in ranks.processes] == [75] * 4
    times = rows_of(ranks.run)[HEALTHY_ROWS + 1:HEALTHY_ROWS + ROWS]
    own, waits = (np.median([row.ms[key] for row in times], axis=0) for key in ("own", "reduce_wait"))
    assert int(own.argmax()) == SLOW
    assert int(waits.argmin()) == SLOW
    named = [row["slowest_rank"] for row in read_metrics(ranks.run) if "slowest_rank" in row][HEALTHY_ROWS + 1:]
    assert max(set(named), key=named.count) == SLOW
    header = json.loads((ranks.run / "rank_times.jsonl").read_text().splitlines()[0])
    assert (header["start"], len(header["hosts"])) == (0, 4)
    assert header["coordinates"][SLOW] == {"pipeline": 0, "data": SLOW, "sequence": 0, "tensor": 0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_slow_rank_is_named(kind: str, layout: str, tmp_path: Path) -> None:
    """Not for loaded machines: the noisier the machine, the slower must be a rank that is named."""
    if kind in ("throttled", "slow_link") and os.geteuid() != 0:
        pytest.skip("control groups and network namespaces are changed by root only")
    first = plant(tmp_path, kind, layout, 1, seconds=240, block_s=0.5)[0][0]
    assert (first["ranks"], first["kind"]) == ([1], EXPECTED[kind])
