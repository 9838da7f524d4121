"""Run the cases of test_kill.py, test_saver.py and test_hangs.py. A case is a run of `train.py`; some are killed.

This program runs in a fork of the warm process. Each rank of each run is a fork of this program and starts in 1 s.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pretrain import step_loop as loop
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints, wait_for_writers
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save import background
from pretrain.train import main
from tests.distributed.workers.full_disk import fill_during_saves
from tests.distributed.workers.hanging import hang
from tests.distributed.workers.killed_writer import SUB_STEPS, die_after
from tests.distributed.workers.nonfinite import put_nan_at
from tests.support import run_rows
from tests.support.launch import free_port, rank_environment
from tests.support.poison import poison
from tests.support.supervised import wait_until

RANKS = 2
LIMIT_S = 600.0  # a test that hangs fails after this time


def log_of(case: dict[str, Any]) -> Path:
    return Path(case.get("log", case["run"]) + ".log")


def hold(at_call: int, until: Path) -> None:
    """Make training wait for the file `until` before step `at_call` of this process. It first makes `reached(until)`.

    Without this wait, a run on a fast machine could end before the test has acted on the run.
    """
    train_batch = loop.train_batch
    calls = itertools.count(1)

    def held(*args: Any) -> Any:
        if next(calls) == at_call:
            reached(until).touch()
            while not until.exists():
                time.sleep(0.005)
        return train_batch(*args)

    loop.train_batch = held


def reached(until: Path) -> Path:
    return until.with_suffix(".reached")


def list_files_opened(into: Path, below: Path) -> None:
    """Log the names of the files below a folder that this process opens for writing, one per line."""
    descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & os.O_ACCMODE and str(values[0]).startswith(str(below)):
            os.write(descriptor, f"{Path(values[0]).name}\n".encode())

    sys.addaudithook(hook)


def start(case: dict[str, Any], sub_step: str | None = None, *, hold_at: int = 0) -> list[int]:
    """Fork the ranks of one run, and return their process ids.

    Before step `hold_at`, the ranks wait for the file `released(case)`.
    """
    flags, log = case["flags"], log_of(case)
    port = free_port()
    ranks = []
    for rank in range(case.get("started_ranks", RANKS)):
        pid = os.fork()
        if pid == 0:
            output = os.open(case.get("output", log.with_suffix(f".{rank}.log")),
                             os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(rank_environment(rank, RANKS, port))
            list_files_opened(log.with_suffix(f".{rank}.opened"), Path(case["run"]) / "checkpoints")
            if "fill" in case:
                fill_during_saves(Path(case["disk"]), case["fill"])
            if "nan_at" in case:
                put_nan_at(case["nan_at"])
            if hold_at:
                hold(hold_at, released(case))
            if sub_step is not None and "--async_save=true" in flags:
                os.environ["KILLED_WRITER_SUB_STEP"] = sub_step
                background.WRITER_MODULE = "tests.distributed.workers.killed_writer"
            elif sub_step is not None:
                die_after(sub_step)
            if rank == case.get("hanging_rank"):
                hang(case["how"], log.with_suffix(".hung"))
            os._exit(main(flags))
        ranks.append(pid)
    return ranks


def released(case: dict[str, Any]) -> Path:
    """Return the file for which a held run waits."""
    return log_of(case).with_suffix(".released")


def statuses(pids: list[int]) -> dict[str, Any]:
    """Wait until the ranks exit, and return their exit codes."""
    return {"status": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]}


def hung(case: dict[str, Any]) -> dict[str, Any]:
    """Start several runs at once, and wait until their ranks have exited.

    Returns name -> exit codes of the run's ranks, seconds from the hang until each rank has exited, and the output.
    """
    running = {run["name"]: dict(enumerate(start(run))) for run in case["runs"]}
    results: dict[str, Any] = {name: {"status": [None] * len(ranks), "seconds": [0.0] * len(ranks)}
                               for name, ranks in running.items()}
    began, deadline = time.time(), time.monotonic() + LIMIT_S
    while any(running.values()):
        assert time.monotonic() < deadline, running
        time.sleep(0.1)
        for run in case["runs"]:
            ranks, result, mark = running[run["name"]], results[run["name"]], log_of(run).with_suffix(".hung")
            for rank, pid in [*ranks.items()]:
                if not is_alive(pid):
                    since = float(mark.read_text()) if mark.exists() else began
                    result["seconds"][rank] = round(time.time() - since, 1)
                    result["status"][rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    del ranks[rank]
    for run in case["runs"]:
        results[run["name"]]["output"] = [log_of(run).with_suffix(f".{rank}.log").read_text()
                                          for rank in range(len(results[run["name"]]["status"]))]
    return results


def is_alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def writer_of_rank_0(checkpoints: Path) -> bool:
    """Return whether the background writer of rank 0 runs."""
    return not subprocess.run(["pgrep", "-f", f"writer [0-9]+ {checkpoints} 0$"], check=False,
                              capture_output=True).returncode


def has_killed_itself(case: dict[str, Any], rank_0: int) -> bool:
    """Return whether `killed_writer` has killed rank 0 or, with --async_save, its writer."""
    return not (writer_of_rank_0(Path(case["run"]) / "checkpoints") if case["async"] else is_alive(rank_0))


def kill(pids: list[int], checkpoints: Path, *, writers_too: bool) -> None:
    if writers_too:
        subprocess.run(["pkill", "-9", "-f", f"writer [0-9]+ {checkpoints}"], check=False)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def seconds_until_peer_ends(pids: list[int], victim: int) -> float:
    """Kill one rank. Return the seconds until the other rank has ended by itself."""
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    os.waitpid(pids[1 - victim], 0)
    seconds = time.monotonic() - began
    os.waitpid(pids[victim], 0)
    return round(seconds, 1)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return run_rows.events(run, kind) if (run / "events.jsonl").is_file() else []


def newest_verified(checkpoints: Path) -> int:
    """Return the step of the newest undamaged checkpoint, or 0. This does not use the code under test."""
    return max((manifest.step for folder, manifest in complete_checkpoints(checkpoints)[0]
                if not find_damage(folder, manifest)), default=0)


def wait_for_event(run: Path, kind: str, *, more_than: int) -> dict[str, Any]:
    """Wait for more than `more_than` events of a kind, and return the newest."""
    wait_until(lambda: len(events(run, kind)) > more_than, lambda: f"no event {kind} in {run}", poll_s=0.005)
    return events(run, kind)[-1]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train to the end."""
    return statuses(start(case))


def shell(case: dict[str, Any]) -> dict[str, Any]:
    return {"status": subprocess.run(case["command"], shell=True, check=True).returncode}


def poisoned(case: dict[str, Any]) -> dict[str, Any]:
    """Replace a file of a checkpoint by a pickle that would create the file `canary`."""
    poison(Path(case["run"]), case["file"], case["canary"])
    return {}


def stopped_writer(case: dict[str, Any]) -> dict[str, Any]:
    """Stop the writer of rank 0 after the first save, and continue the writer after a save was skipped."""
    folder = Path(case["run"])
    pids = start(case, hold_at=10)
    wait_for_event(folder, "save", more_than=0)
    subprocess.run(["pkill", "-STOP", "-f", f"writer [0-9]+ {folder.absolute()}/checkpoints 0$"], check=True)
    released(case).touch()
    wait_for_event(folder, "save_skipped", more_than=len(events(folder, "save_skipped")))
    subprocess.run(["pkill", "-CONT", "-f", f"writer [0-9]+ {folder.absolute()}/checkpoints 0$"], check=True)
    return statuses(pids)


def lost_writer(case: dict[str, Any]) -> dict[str, Any]:
    """Kill the writer of rank 1 after the first save."""
    folder = Path(case["run"])
    pids = start(case, hold_at=10)
    wait_for_event(folder, "save", more_than=0)
    subprocess.run(["pkill", "-9", "-f", f"writer [0-9]+ {folder.absolute()}/checkpoints 1$"], check=True)
    released(case).touch()
    return statuses(pids)


def killed(case: dict[str, Any]) -> dict[str, Any]:
    """Kill one run for each item of case["kills"], then train to the end.

    Return (newest complete checkpoint, first step) of each run, the seconds of `seconds_until_peer_ends`, and the exit
    codes of the last run.
    """
    numbers, folder = random.Random(case["name"]), Path(case["run"])
    checkpoints, resumed, peers_s = folder / "checkpoints", [], []
    hold_at = case["steps"] // (len(case["kills"]) + 1)  # steps of one run, so that some remain for the next
    for when in [*case["kills"], "end"]:
        expected, starts, snapshots = newest_verified(checkpoints), *(len(events(folder, kind)) for kind in
                                                                      ("start", "snapshot"))
        pids = start(case, when if when in SUB_STEPS else None,
                     hold_at=hold_at if when in ("random", "one rank", "snapshot") else 0)
        resumed.append([expected, wait_for_event(folder, "start", more_than=starts)["step"]])
        if when == "end":
            return {"resumed": resumed, "peers_s": peers_s, **statuses(pids)}
        if when in ("random", "one rank"):
            if len(resumed) == 1:  # the next run needs a checkpoint
                wait_for_event(folder, "save", more_than=0)
            time.sleep(numbers.uniform(0, case["window_s"]))
        elif when == "snapshot":  # kill when the snapshot is in memory and may not yet be on disk
            taken = wait_for_event(folder, "snapshot", more_than=snapshots)["step"]
        else:  # rank 0 or its writer kills itself
            wait_until(partial(has_killed_itself, case, pids[0]), partial(str, when))
        if when == "one rank":
            peers_s.append(seconds_until_peer_ends(pids, numbers.randrange(RANKS)))
            pids = []
        kill(pids, checkpoints, writers_too=when != "snapshot" and numbers.random() < 0.5)
        wait_for_writers(checkpoints, timeout_s=LIMIT_S)
        assert when != "snapshot" or newest_verified(checkpoints) >= taken, "a snapshot was lost"
    raise AssertionError("unreachable")


if __name__ == "__main__":
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        begin = time.monotonic()
        actions = {"run": run, "shell": shell, "stopped_writer": stopped_writer, "lost_writer": lost_writer,
                   "killed": killed, "poisoned": poisoned, "hung": hung}
        results[case["name"]] = actions[case["kind"]](case)
        Path(sys.argv[2]).write_text(json.dumps(results))
        print(f"{case['name']}: {time.monotonic() - begin:.1f} s", flush=True)
