"""A run that was killed while it loaded an operator does not keep the next one from loading it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from torch.utils.file_baton import FileBaton

from pretrain.operator_lock import _ProcessBaton
from tests.distributed.launch import ROOT

LOAD = """
import os, sys
import torch.utils.cpp_extension as extensions
from pretrain.operator_lock import lock_operators_by_process
if sys.argv[1] == "ours":
    lock_operators_by_process()
baton = extensions.FileBaton(sys.argv[2])
if not baton.try_acquire():
    print("waits", flush=True)
    baton.wait()
elif sys.argv[3] == "die":
    os.kill(os.getpid(), 9)
elif sys.argv[3] == "hold":
    print("holds", flush=True)
    sys.stdin.read()
    baton.release()
else:
    baton.release()
print("done", flush=True)
"""


def _start(whose: str, lock: Path, then: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", LOAD, whose, str(lock), then], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_killed_load_blocks_nobody(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert _start("ours", lock, "die").wait(timeout=900) == -signal.SIGKILL
    assert lock.exists()
    assert _start("ours", lock).communicate(timeout=900)[0] == "done\n"
    assert not lock.exists()


def test_plain_torch_waits_for_ever(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert _start("torch's", lock, "die").wait(timeout=900) == -signal.SIGKILL
    waiting = _start("torch's", lock)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "waits\n"
    assert waiting.poll() is None
    waiting.kill()
    waiting.wait()


def test_one_waits_for_the_other(tmp_path: Path) -> None:
    first, lock = _start("ours", tmp_path / "lock", "hold"), tmp_path / "lock"
    assert first.stdout is not None
    assert first.stdout.readline() == "holds\n"
    second = _start("ours", lock)
    assert second.stdout is not None
    assert second.stdout.readline() == "waits\n"
    assert second.poll() is None
    assert first.communicate(timeout=900)[0] == "done\n"
    assert second.communicate(timeout=900)[0] == "done\n"


def test_a_plain_deepspeed_program_at_the_same_moment_is_no_error(tmp_path: Path) -> None:
    """It makes the file, which our lock does not see as taken, and removes it while we hold the lock."""
    theirs, ours = FileBaton(str(tmp_path / "lock")), _ProcessBaton(str(tmp_path / "lock"))
    assert theirs.try_acquire()
    assert ours.try_acquire()
    theirs.release()
    ours.release()
    assert not (tmp_path / "lock").exists()
