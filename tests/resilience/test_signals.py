"""Signals to a rank: the first asks for a save, the second changes nothing, the third ends at once. After a crash of
another rank, SIGTERM ends a rank at once. And which ancestor processes are launchers.

tests/distributed/resilience/test_signals.py sends signals to real runs.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pretrain.checkpoint.save.background import WRITER_MODULE, BackgroundWriter
from pretrain.resilience import signals
from pretrain.resilience.launcher_watch import launcher_name
from pretrain.resilience.signals import ASKING_SIGNAL, SignalCount
from tests.support.launch import ROOT
from tests.support.supervised import wait_until

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(("received", "ordinals"), [
    ([(INT, 0), (INT, 0.1), (INT, 0.2)], [1, 2, 3]),
    ([(INT, 0), (TERM, 0.1), (INT, 1), (TERM, 1.1), (INT, 2)], [1, 0, 2, 0, 3]),  # DeepSpeed's launcher sends SIGTERM
    ([(TERM, 0), (TERM, 0.1), (TERM, 9), (TERM, 9.1), (TERM, 18)], [1, 0, 2, 0, 3]),  # to all processes
    ([(USR1, 0), (USR1, 6), (TERM, 12)], [1, 2, 3]),
])
def test_copies_that_a_launcher_passes_on_do_not_count(received: list[tuple[int, float]], ordinals: list[int],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([at + 100 for _, at in received])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(times))
    count = SignalCount()
    assert [count.add(number) for number, _ in received] == ordinals
    assert count.first == received[0][0]


def _ignores_signals_of_ranks(pid: int) -> bool:
    """Return whether a process ignores the signals that SLURM sends to all processes of a job."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return all(int(line.split()[1], 16) >> (number - 1) & 1 for number in (INT, TERM, USR1, ASKING_SIGNAL))


def test_signals_of_the_ranks_do_not_end_the_background_processes(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path, 0)  # it holds its lock now
    pid, = (process.pid for process in psutil.process_iter() if {WRITER_MODULE, str(tmp_path)} <= _words_of(process))
    assert _ignores_signals_of_ranks(pid)
    writer.close()
    with open(__file__, "rb") as file:  # hashed until standard input is closed: there are very many blocks
        hashing = subprocess.Popen([sys.executable, "-m", "pretrain.data.token_files.hashes",
                                    str(file.fileno()), "0", str(10**9)], stdin=subprocess.PIPE,
                                   stdout=subprocess.DEVNULL, pass_fds=[file.fileno()], cwd=ROOT)
    wait_until(lambda: _ignores_signals_of_ranks(hashing.pid))
    hashing.communicate(timeout=300)


def _words_of(process: psutil.Process) -> set[str]:
    try:
        return {*process.cmdline()}
    except psutil.Error:  # it has ended
        return set()


# A launcher of two ranks, whose main threads sleep in C code, as in a collective.
LAUNCHER = """
import signal, subprocess, sys, time
RANK = '''
import ctypes
from pretrain.resilience.signals import SignalListener
listener = SignalListener(lambda line: print(line, flush=True))
print("ready", flush=True)
while True:
    ctypes.CDLL(None).pause()
'''
ranks = [subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) for _ in range(2)]
try:
    print([rank.stdout.readline().strip() for rank in ranks])
    last = ranks[1]  # a rank that was ready before the other rank started does not watch the other rank
    for number in eval(sys.argv[1]):
        if number == signal.SIGKILL:
            ranks[0].kill()
            ranks[0].wait()
        else:
            last.send_signal(number)
            if not (number == signal.SIGTERM and ranks[0].poll() is not None):
                print(last.stdout.readline().strip())
    print(last.wait(timeout=900))
finally:
    for rank in ranks:
        rank.kill()
"""


def signalled(numbers: list[int]) -> list[str]:
    """Return the lines of a rank that gets these signals, and its exit code."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER, str([int(number) for number in numbers])],
                          capture_output=True, text=True, timeout=900,
                          env={**os.environ, "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)})
    ready, *lines = done.stdout.splitlines()
    assert ready == "['ready', 'ready']", done.stderr[-2000:]
    return lines


def test_the_third_signal_ends_a_rank_that_is_blocked_in_c_code() -> None:
    first, second, third, code = signalled([USR1, INT, INT])
    assert first.startswith("SIGUSR1: all ranks save after the current step, then stop (")
    assert second == "SIGINT: the run is about to save and stop; the next signal ends it at once, without this save"
    assert third.startswith("SIGINT: ended at once")
    assert code == str(128 + INT)


def test_sigterm_ends_a_rank_at_once_only_after_a_crash_of_another_rank() -> None:
    request, code = signalled([TERM, signal.SIGKILL, TERM])
    assert request.startswith("SIGTERM: all ranks save")
    assert code == str(128 + TERM)


@pytest.mark.parametrize(("line", "name"), [
    ("/venv/bin/python -u -m deepspeed.launcher.launch --world_info=x", "deepspeed.launcher.launch"),
    ("/venv/bin/python -u /x/pretrain/cluster/without_torch.py deepspeed.launcher.launch -x", "without_torch.py"),
    ("/venv/bin/python3 /venv/bin/deepspeed --num_gpus 2 train.py", "deepspeed"),
    ("/venv/bin/python3 -m torch.distributed.run train.py", "torch.distributed.run"),
    ("/venv/bin/python3 /venv/bin/torchrun train.py", "torchrun"),
    ("/venv/bin/python /venv/bin/ds-pretrain --config run.yaml", "ds-pretrain"),
    ("mpirun.openmpi -np 2 python train.py", "mpirun.openmpi"),
    ("slurmstepd: [7.0]", "slurmstepd"),
    ("bash -c 'deepspeed train.py'", ""),
    ("/usr/bin/python3 -c deepspeed", ""),
    ("/usr/bin/python3 run_everything.py deepspeed", ""),
    ("nohup deepspeed", ""),
    ("", ""),
])
def test_launchers_are_recognized_by_their_command_line(line: str, name: str) -> None:
    assert launcher_name(line.split()) == name
