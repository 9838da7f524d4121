"""Blocks whose matrices tensor-parallel ranks share compute the same as one rank, in every family of models."""

from pathlib import Path

from tests.support.launch import WORKERS, run_ranks, tails


def test_models_of_every_family_equal_those_of_one_rank(tmp_path: Path) -> None:
    done = run_ranks([str(WORKERS / "block_worker.py")], 2, cwd=tmp_path)
    assert [process.returncode for process in done] == [0, 0], tails(tmp_path, 2)
