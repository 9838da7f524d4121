"""Failing monitors of DeepSpeed 0.19.8: plain, they raise on rank 0; with `patches/monitors.py`, each warns once."""

import resource
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from deepspeed.monitor import monitor as monitors
from deepspeed.monitor.config import DeepSpeedMonitorConfig

from pretrain.engine.patches.monitors import patch_flops_profiler, survive_failing_monitors, survive_failing_profile

BLOCKS = ("tensorboard", "csv_monitor")
CLASSES = ("TensorBoardMonitor", "csvMonitor", "WandbMonitor", "CometMonitor")


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the monitors run without a process group, and undo the work-around after the test."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    for name in CLASSES:
        monkeypatch.setattr(monitors, name, getattr(monitors, name))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


def _master(folder: Path, *blocks: str) -> Any:
    return monitors.MonitorMaster(DeepSpeedMonitorConfig(**{
        block: {"enabled": True, "output_path": str(folder / block), "job_name": "job"} for block in blocks}))


def _write(master: Any, count: int) -> None:
    for step in range(count):
        master.write_events([("Train/Samples/train_loss", 1.5, step), ("Train/Samples/lr", 1e-3, step)])


def _write_with_full_disk(master: Any, count: int) -> None:
    """Write events while every file of this process is limited to one byte: as on a full disk, writes fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        _write(master, count)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_plain_monitors_raise(block: str, rank_0: None, tmp_path: Path) -> None:
    """If no error is raised, DeepSpeed has fixed this: then delete survive_failing_monitors."""
    master = _master(tmp_path, block)
    _write(master, 2)
    with pytest.raises(OSError, match="File too large"):
        _write_with_full_disk(master, 3)
    (tmp_path / block / "job").rename(tmp_path / "moved")
    (tmp_path / block / "job").touch()
    with pytest.raises(OSError, match="File exists"):
        _master(tmp_path, block)


def test_a_failing_monitor_warns_once_and_the_others_continue(rank_0: None, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    survive_failing_monitors()
    survive_failing_monitors()
    master = _master(tmp_path, *BLOCKS)
    _write(master, 2)
    loss = tmp_path / "csv_monitor" / "job" / "Train_Samples_train_loss.csv"
    loss.unlink()
    loss.symlink_to("/dev/full")
    _write(master, 50)
    assert capsys.readouterr().err.splitlines() == [
        "warning: csv_monitor: the monitor failed (OSError: [Errno 28] No space left on device); the run continues "
        "without it"]
    _write_with_full_disk(master, 50)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: tensorboard: the monitor failed (OSError: [Errno 27] File too large")


def test_a_resumed_run_continues_its_csv_files(rank_0: None, tmp_path: Path) -> None:
    survive_failing_monitors()
    for _ in range(2):
        _write(_master(tmp_path / "ours", "csv_monitor"), 2)
    assert _csv_lines(tmp_path / "ours") == ["step,lr", "0,0.001", "1,0.001", "0,0.001", "1,0.001"]


def _csv_lines(folder: Path) -> list[str]:
    return (folder / "csv_monitor" / "job" / "Train_Samples_lr.csv").read_text().splitlines()


def test_a_monitor_that_cannot_be_made_warns_once(rank_0: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake package stands for W&B, which needs an account. It raises as W&B does without a login."""
    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty)\nmore lines")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    (tmp_path / "csv_monitor").mkdir()
    (tmp_path / "csv_monitor" / "job").touch()
    survive_failing_monitors()
    master = monitors.MonitorMaster(DeepSpeedMonitorConfig(wandb={"enabled": True}, csv_monitor={
        "enabled": True, "output_path": str(tmp_path / "csv_monitor"), "job_name": "job"}))
    _write(master, 3)
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "warning: wandb: the monitor failed", "warning: csv_monitor: the monitor failed"]


def test_a_profile_that_cannot_be_written_warns(capsys: pytest.CaptureFixture[str]) -> None:
    def print_model_profile(**_: Any) -> None:
        sys.stdout = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 (as DeepSpeed's profiler does)
        print("a profile", flush=True)

    profiler = types.SimpleNamespace(print_model_profile=print_model_profile)
    before = sys.stdout
    survive_failing_profile(profiler)
    profiler.print_model_profile(output_file="x")
    assert sys.stdout is before
    assert "warning: flops_profiler: the profile is not written (OSError: " in capsys.readouterr().err
    patch_flops_profiler(types.SimpleNamespace())  # type: ignore[arg-type]
