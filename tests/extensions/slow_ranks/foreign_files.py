"""Times of a foreign run: see tests/foreign_files/commands.py."""

from pathlib import Path

from tests.foreign_files.payloads import dumped
from tests.support.run_folders import rank_rows

FILES: dict[str, dict[str, tuple[str, ...]]] = {"run": {"rank_times.jsonl": ()}}


def write_in_run(run: Path) -> None:
    """Write times of two ranks."""
    (run / "rank_times.jsonl").write_text(dumped("x.jsonl", rank_rows(["a", "b"], range(1, 5), {1: 3.0})))
