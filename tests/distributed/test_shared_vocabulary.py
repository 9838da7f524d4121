"""A vocabulary that tensor-parallel ranks share gives the same values and gradients as one rank with all words."""

from pathlib import Path

from tests.support.launch import WORKERS, run_ranks, tails


def test_embeddings_head_and_loss_equal_those_of_one_rank(tmp_path: Path) -> None:
    """The vocabulary of 97 words is divided unevenly. The worker compares in fp64 (see there)."""
    done = run_ranks([str(WORKERS / "vocabulary_worker.py")], 2, cwd=tmp_path)
    assert [process.returncode for process in done] == [0, 0], tails(tmp_path, 2)
