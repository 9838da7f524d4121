"""A rank of a real run that is stopped for a part of the time has the most time of its own; the others wait for it."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pretrain.monitor.read_run_folder import read_metrics
from pretrain.paths import STOP_FILE
from tests.support.cases import config, flags
from tests.support.launch import train_ranks
from tests.support.slow_ranks import EXPECTED, LAYOUTS, PLANTS, plant, rows_of, stop_in_each_row

SLOW, HEALTHY_ROWS, ROWS = 2, 5, 10


def pid_of_rank(folder: Path, rank: int) -> int:
    """Return the process whose output is the log of a rank."""
    log = str(folder / f"rank{rank}.log")
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and os.readlink(process / "fd" / "1") == log:
                return int(process.name)
    raise AssertionError(f"no process writes to {log}")


@contextlib.contextmanager
def ended(run: Path) -> Iterator[None]:
    try:
        yield
    finally:
        run.mkdir(exist_ok=True)
        (run / STOP_FILE).touch()


def test_the_others_wait_for_a_rank_that_is_stopped(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(1, precision="bf16", accumulation=1)))
    values = {**flags(corpus, hidden=32, layers=2, steps=10**5), "log_interval": 1, "save_interval": 0,
              "eval_interval": 0, "deepspeed_config": "ds.json", "save": "run"}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as pool, ended(run):
        future = pool.submit(train_ranks, 4, words, tmp_path)
        while len(rows_of(run)) < HEALTHY_ROWS and not future.done():
            time.sleep(0.2)
        assert not future.done(), future.result()[0].stdout
        pid = pid_of_rank(tmp_path, SLOW)
        stop_in_each_row(run, pid, lambda: len(rows_of(run)) >= HEALTHY_ROWS + ROWS or future.done())
    assert [process.returncode for process in future.result()] == [75] * 4
    times = rows_of(run)[HEALTHY_ROWS + 1:]
    own, waits = (np.median([row.ms[key] for row in times], axis=0) for key in ("own", "reduce_wait"))
    assert int(own.argmax()) == SLOW
    assert int(waits.argmin()) == SLOW
    named = [row["slowest_rank"] for row in read_metrics(run) if "slowest_rank" in row][HEALTHY_ROWS + 1:]
    assert max(set(named), key=named.count) == SLOW
    header = json.loads((run / "rank_times.jsonl").read_text().splitlines()[0])
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
