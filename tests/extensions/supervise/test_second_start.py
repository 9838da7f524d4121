"""A start by the supervisor on a run folder in which another start is training, and reads of it that fail."""

import sys
from pathlib import Path

from tests.cluster.test_passing_errors import failed_reads
from tests.cluster.test_second_start import check_rejection, live  # noqa: F401 (a fixture)
from tests.support.launch import ROOT


def test_a_later_start_is_rejected(live: tuple[Path, list[str], str]) -> None:  # noqa: F811
    run, flags, _ = live
    train = [sys.executable, str(ROOT / "pretrain/train.py"), *flags]
    check_rejection("supervise.py", [str(ROOT / "launch/supervise.py"), "--", *train], run, ".supervisor.lock")


def test_an_error_at_any_read_does_not_end_the_supervisor(tmp_path: Path) -> None:
    for row in failed_reads("tests.extensions.supervise.failing_reads", tmp_path, {"supervise"}):
        if "rejected" in row:  # the user is still there when the folder is created
            assert not row["began"], row
            assert row["read"] == 1, row
        else:
            assert (row["code"], row["began"]) == (0, True), row
