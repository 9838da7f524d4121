"""Run the cases of tests/distributed/resilience/test_signals.py: real ranks that get signals, STOP and SAVE files.

This program runs in a fork of the warm process. Each rank of each start is a fork of this program.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pretrain.checkpoint.save import commit
from pretrain.cluster import ds_pretrain
from pretrain.cluster.hosts import launcher_process
from pretrain.resilience import requests
from pretrain.resilience.launcher_watch import LAUNCHER_VARIABLE
from pretrain.resilience.signals import SignalListener
from pretrain.train import main
from tests.distributed.workers.forked import RANKS, hold, is_alive, log_of, reached, released, statuses
from tests.distributed.workers.killed_writer import SUB_STEPS
from tests.support.launch import free_port, rank_environment
from tests.support.supervised import wait_until

HOLD_AT = 4  # the ranks of a start wait in this step, unless the case has the key "hold_at"


def fork_ranks(run: Callable[[], int], log: Path) -> list[int]:
    """Fork the ranks of one start, and return their process ids. Each rank calls `run` and exits with its result."""
    port, ranks = free_port(), []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            output = os.open(log.with_suffix(f".{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(rank_environment(rank, RANKS, port))
            code = 1
            try:
                code = run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ranks.append(pid)
    return ranks


def signal_at(name: str) -> None:
    """Send SIGINT to this process after the first sub-step of a commit ("second") or after each of them ("third")."""
    for sub_step in SUB_STEPS[:1] if name == "second" else SUB_STEPS:
        function = getattr(commit, sub_step)

        def signalling(*args: Any, function: Callable[..., Any] = function, **keywords: Any) -> Any:
            result = function(*args, **keywords)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the thread that counts signals may end the process
            return result

        setattr(commit, sub_step, signalling)


def got_signal(case: dict[str, Any], rank: int) -> Path:
    """Return the file that a rank creates when it has received a signal."""
    return log_of(case).with_suffix(f".{rank}.signal")


def mark_signals(mark: Path) -> None:
    """Make this rank create the file `mark` when it has received a signal."""
    receive = SignalListener._receive

    def marking(self: SignalListener, number: int) -> None:
        receive(self, number)
        mark.touch()

    SignalListener._receive = marking  # type: ignore[method-assign]


def start(case: dict[str, Any]) -> list[int]:
    """Fork the ranks of a run, which wait in step case["hold_at"] of this start unless case["act"] is "run"."""

    def run() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and a run leaves it so
        requests._LONGEST_LOOK_S = 0.0  # under load, a look for the files may take long by chance
        mark_signals(got_signal(case, int(os.environ["RANK"])))
        if case["act"] != "run":
            hold(case.get("hold_at", HOLD_AT), released(case))
        if "during_save" in case and os.environ["RANK"] == "0":
            signal_at(case["during_save"])
        return main(case["flags"])

    return fork_ranks(run, log_of(case))


class ForkedLauncher:
    """Stands for DeepSpeed's launcher in `run_launcher`. It forks the ranks, and returns the code of a failed rank."""

    def __init__(self, case: dict[str, Any], environ: dict[str, str]) -> None:
        os.environ[LAUNCHER_VARIABLE] = environ[LAUNCHER_VARIABLE]
        self._codes: dict[int, int | None] = dict.fromkeys(start(case))
        self.pid = 0
        log_of(case).with_suffix(".pids").write_text(json.dumps(list(self._codes)))

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while None in self._codes.values():
            for pid in [pid for pid, code in self._codes.items() if code is None]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                self._codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("ranks", timeout)
            time.sleep(0.02)
        return max(code or 0 for code in self._codes.values())


def launch(case: dict[str, Any]) -> int:
    """Fork a process that runs `run_launcher` of ds-pretrain with forked ranks, and return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ds_pretrain.subprocess = SimpleNamespace(  # type: ignore[assignment]
                Popen=lambda command, env, **_: ForkedLauncher(case, env))
            launcher_process.reap_orphans = lambda launcher: None  # ForkedLauncher waits for the ranks itself
            code = ds_pretrain.run_launcher([], {}, Path(case["run"]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pids: list[int]) -> bool:
    """Return whether a process has ended. A test of a run that has ended too early then fails without a time-out."""
    return not all(map(is_alive, pids))


def act(case: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks, act while they wait in a step, release them, and return their exit codes.

    case["act"]: "run" (nothing), "touch" (the files case["files"] of the run folder), or the name of a signal, which
    the ranks case["ranks"] get, or the launcher if case["ranks"] is "launcher". After SIGKILL to the launcher, the
    result has the exit codes of the ranks, otherwise of the launcher.
    """
    folder, by_launcher = Path(case["run"]), case.get("ranks") == "launcher"
    for path in (released(case), reached(released(case)), *(got_signal(case, rank) for rank in range(RANKS))):
        path.unlink(missing_ok=True)

    pids = [launch(case)] if by_launcher else start(case)
    if case["act"] != "run":
        wait_until(lambda: reached(released(case)).exists() or ended(pids), lambda: f"no steps in {folder}",
                   poll_s=0.005)
        if case["act"] == "touch":
            for name in case["files"]:
                (folder / name).touch()
        elif case["act"] != "nothing":
            for pid in pids if by_launcher else [pids[rank] for rank in case["ranks"]]:
                os.kill(pid, signal.Signals[case["act"]])
        if case["act"] == "SIGKILL":
            os.waitpid(pids[0], 0)
            pids = json.loads(log_of(case).with_suffix(".pids").read_text())  # now children of this subreaper
            time.sleep(2)  # the ranks notice it within a second
        elif "ranks" in case:
            ranks = range(RANKS) if by_launcher else case["ranks"]
            wait_until(lambda: all(got_signal(case, rank).exists() for rank in ranks) or ended(pids), poll_s=0.005)
        released(case).touch()
    return statuses(pids)


if __name__ == "__main__":
    results = {}
    launcher_process.become_subreaper()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        begin = time.monotonic()
        results[case["name"]] = act(case)
        Path(sys.argv[2]).write_text(json.dumps(results))
        print(f"{case['name']}: {time.monotonic() - begin:.1f} s", flush=True)
