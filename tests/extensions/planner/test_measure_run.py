"""The error of `compare_zero.py measure` for a failed rank names the exit code or signal and the last lines.

The ranks are real processes.
"""

import json
from pathlib import Path

import pytest

from pretrain.extensions.planner.measure import measure_run
from pretrain.extensions.planner.measure.measure_run import FailedRank, failure_error

SMALLER = "fewer layers or a smaller micro-batch"


def failed(folder: Path, monkeypatch: pytest.MonkeyPatch, *how: str, timeout_s: float = 60) -> list[FailedRank]:
    """Run one rank for each behaviour in `how` (see workers/failing_rank.py). Return the failed ranks, worst first."""
    monkeypatch.setattr(measure_run, "RANK_MODULE", "tests.distributed.workers.failing_rank")
    (folder / "request.json").write_text(json.dumps({"do": how}))
    return sorted(measure_run.run_ranks(folder, len(how), timeout_s), key=FailedRank.severity)


def test_an_aborted_rank_is_not_reported_as_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = failed(tmp_path, monkeypatch, "lose", "abort")
    assert (first.rank, first.code, second.rank, second.code) == (1, -6, 0, 1)
    line = str(failure_error("zero2", first, 0))
    assert line == ("measure zero2: rank 1 was ended by SIGABRT; its last lines: rank 1: begins | terminate called "
                    "without an active exception.")


def test_the_cause_of_a_sigkill_follows_the_kernels_count_of_oom_kills(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = failed(tmp_path, monkeypatch, "wait", "kill")  # the first failure ends the other rank
    assert rank.rank == 1
    for oom_kills, cause in (
            (0, "by SIGKILL from another process (the kernel counts no kill for lack of memory)"),
            (1, "killed by the kernel for lack of memory"),
            (None, "by SIGKILL, either from another process or from the kernel")):
        line = str(failure_error("zero2", rank, oom_kills))
        assert cause in line
        assert (SMALLER in line) == bool(oom_kills)


def test_an_allocation_error_is_reported_as_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = failed(tmp_path, monkeypatch, "lose", "allocate")
    line = str(failure_error("zero2", first, 0))
    assert "rank 1 failed with exit code 1: RuntimeError: DefaultCPUAllocator: can't allocate memory" in line
    assert SMALLER in line


def test_a_rank_that_exceeds_the_timeout_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = failed(tmp_path, monkeypatch, "wait", timeout_s=3)
    assert "rank 0 was still running at the timeout" in str(failure_error("zero2", rank, 0))
