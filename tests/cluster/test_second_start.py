"""Real starts on one run folder: by ds-pretrain, and by train.py alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pretrain.resilience.lease_file import read_lease
from pretrain.resilience.run_lock import LOCK
from tests.support.launch import ROOT
from tests.support.supervised import kill_tree, rows, wait_until
from tests.test_train import _environment, _flags

ZERO2 = ROOT / "ds_configs" / "zero2_bf16.json"


def _start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**_environment(), "PYTHONPATH": str(ROOT)}, start_new_session=True)


@pytest.fixture(scope="module")
def live(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str], str]]:
    """Start a run twice at the same moment. Return its folder, its flags, and the line of the rejected start.

    The other start is training, and has committed a checkpoint.
    """
    run = tmp_path_factory.mktemp("twice") / "run"
    flags = _flags(corpus, run, "--train_steps", "100000", "--save_interval", "5", "--keep_checkpoints", "2",
                   config=ZERO2)
    starts = [_start(["-m", "pretrain", "--num_accelerators", "1", *flags]) for _ in range(2)]
    try:
        wait_until(lambda: any(start.poll() is not None for start in starts))
        rejected = next(start for start in starts if start.poll() is not None)
        stderr = rejected.communicate()[1]
        assert rejected.returncode == 2, stderr
        wait_until(lambda: (run / "checkpoints" / "latest").exists())
        yield run, flags, stderr
    finally:
        for start in starts:
            kill_tree(start)


def _rank(run: Path) -> int:
    lease = read_lease(run / LOCK)
    assert lease is not None
    return lease.owner.pid


def test_one_of_two_simultaneous_starts_trains(live: tuple[Path, list[str], str]) -> None:
    run, _, stderr = live
    lines = [line for line in stderr.splitlines() if line.startswith("ds-pretrain: error: ")]
    assert len(lines) == 1, stderr
    assert f"--save {run}: another start is training in this run folder (process {_rank(run)} on " in lines[0]
    assert len(json.loads((run / "run.json").read_text())) == 1
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1))


def _commands(flags: list[str], folder: Path) -> dict[str, list[str]]:
    """Return ways to start the run. The check of a SLURM job and --no_ssh are stages of starts on several hosts."""
    hostfile = folder / "hosts"
    hostfile.write_text("no-such-host slots=1\n")
    train = [str(ROOT / "pretrain" / "train.py"), *flags]
    return {"ds-pretrain": ["-m", "pretrain", "--num_accelerators", "1", *flags],
            "cluster.sh": ["-m", "pretrain.cluster.multihost_launch", "--hostfile", str(hostfile), "--no_ssh",
                           "--node_rank", "0", "--master_addr", "127.0.0.1", "--", *flags],
            "SLURM": ["-m", "pretrain.cluster.slurm_job", "before", "--world_size", "1", *flags],
            "train.py": train, "--resume never": [*train, "--resume", "never"]}


@pytest.mark.parametrize("how", ["ds-pretrain", "cluster.sh", "SLURM", "train.py", "--resume never"])
def test_a_later_start_is_rejected(how: str, live: tuple[Path, list[str], str], tmp_path: Path) -> None:
    run, flags, _ = live
    check_rejection(how, _commands(flags, tmp_path)[how], run)


def check_rejection(how: str, words: list[str], run: Path, *new_files: str) -> None:
    """Check that a start is rejected in one line, before torch is imported; the live run is left alone."""
    files = {path.name for path in run.iterdir()} | {*new_files}
    began = time.monotonic()
    done = _start(words)
    stdout, stderr = done.communicate()
    print(f"{how}: rejected after {time.monotonic() - began:.1f} s")
    assert (done.returncode, stdout) == (2, ""), stderr
    line, = stderr.splitlines()
    assert "is training in this run folder" in line or line.startswith(f"ds-pretrain: error: {how}:")
    assert {path.name for path in run.iterdir()} <= files
    assert psutil.pid_exists(_rank(run))


def test_a_run_can_be_validated_while_it_trains(live: tuple[Path, list[str], str], tmp_path: Path) -> None:
    _, flags, _ = live
    done = _start([*_commands(flags, tmp_path)["ds-pretrain"], "--check_only"])
    stdout, stderr = done.communicate()
    assert done.returncode == 0, stderr
    assert "the run is valid" in stdout + stderr


def test_after_a_kill_the_run_can_be_started_again_at_once(live: tuple[Path, list[str], str]) -> None:
    run, flags, _ = live
    killed = _rank(run)
    os.kill(killed, 9)
    again = _start([str(ROOT / "pretrain" / "train.py"), *flags, "--exit_step", str(rows(run)[-1]["step"] + 200)])
    try:
        wait_until(lambda: len(json.loads((run / "run.json").read_text())) == 2 or again.poll() is not None)
        assert _rank(run) == again.pid
        again.terminate()
        stderr = again.communicate()[1]
    finally:
        kill_tree(again)
    assert again.returncode in (0, 75), stderr
    assert f"the earlier start has ended without releasing its lock (process {killed} on" in stderr
    lease = read_lease(run / LOCK)
    assert lease is not None
    assert lease.released
