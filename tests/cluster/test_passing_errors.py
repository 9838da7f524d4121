"""`ds-pretrain` survives a network file system that cannot be read for a moment."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.cluster import outcome, slurm_job
from pretrain.cluster.outcome import read_patiently
from tests.support.failing_reads import STOP
from tests.support.launch import ROOT


def failed_reads(module: str, folder: Path, programs: set[str]) -> list[dict[str, Any]]:
    """Run a module as failing_reads.py. Returns its rows. Each program has some reads, and none has a traceback."""
    done = subprocess.run([sys.executable, "-m", module, str(folder)], cwd=ROOT, text=True, capture_output=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert {row["program"] for row in rows if row["read"] is not None} == programs
    for row in (next(row for row in rows if row["program"] == name) for name in programs):
        assert row["reads"] > 1, "no read was found"
    assert [row for row in rows if "traceback" in row] == []
    return rows


def test_an_error_at_any_read_changes_no_exit_code(tmp_path: Path) -> None:
    for row in failed_reads("tests.support.failing_reads", tmp_path, {"launch", "save"}):
        if "rejected" in row:  # the user is still there when the folder is created
            assert not row["began"], row
            assert row["read"] == 1, row
        else:  # that the run was saved is in its files, which cannot be read in a long outage
            assert row["code"] in ((75, 1) if row["program"] == "launch" and row["outage"] else (75,)), row


def test_a_read_is_tried_again_and_then_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, lines = [OSError(errno.ESTALE, "Stale file handle")] * 2, list[str]()

    def read() -> int:
        if errors:
            raise errors.pop()
        return 7

    assert read_patiently(tmp_path, read, otherwise=0, report=lines.append) == 7
    monkeypatch.setattr(outcome, "RETRY_S", 0.0)
    errors.append(OSError(errno.EIO, "Input/output error"))
    assert read_patiently(tmp_path, read, otherwise=3, report=lines.append) == 3
    assert read_patiently(tmp_path / "unmounted", read, otherwise=3, exists=True, report=lines.append) == 3
    assert lines == [f"warning: {tmp_path} cannot be read: Input/output error",
                     f"warning: {tmp_path}/unmounted cannot be read: No such file or directory"]


def test_a_slurm_job_is_requeued_although_its_folder_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    (tmp_path / "events.jsonl").write_text(STOP % "SIGTERM")
    monkeypatch.setattr(outcome, "RETRY_S", 0.0)

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for name in ("read_record", "newest_step", "read_events"):
        monkeypatch.setattr(slurm_job, name, fail)
    assert slurm_job.after(tmp_path, {"SLURM_JOB_ID": "7"}, exit_code=75) == 0
