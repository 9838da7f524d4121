"""Trains, is killed with SIGKILL in the middle of saves, is started again, to the end; for test_kill.py.

One process imports and loads everything once; each rank of each start is a fork of it, and so begins in a second.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 (compiles at import)
import torch._inductor.compile_fx  # noqa: F401
from deepspeed.accelerator import get_accelerator

import pretrain.loop  # noqa: F401
from pretrain.checkpoint import background
from pretrain.checkpoint.manifest import whole_checkpoints
from pretrain.checkpoint.verify import damage
from pretrain.checkpoint.writer import wait_for_writers
from pretrain.train import main
from tests.distributed.killed_writer import die_after
from tests.distributed.launch import free_port, rank_environment

RANKS = 2


def start(flags: list[str], log: Path, sub_step: str | None) -> list[int]:
    """Fork the ranks of one run; their process ids."""
    port = free_port()
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            output = os.open(log.with_suffix(f".{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(rank_environment(rank, RANKS, port))
            if sub_step is not None and "--async_save=true" in flags:
                os.environ["KILLED_WRITER_SUB_STEP"] = sub_step
                background.WRITER_MODULE = "tests.distributed.killed_writer"
            elif sub_step is not None:
                die_after(sub_step)
            os._exit(main(flags))
        ranks.append(pid)
    return ranks


def is_alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def writer_of_rank_0(checkpoints: Path) -> bool:
    """Whether it runs."""
    return not subprocess.run(["pgrep", "-f", f"writer [0-9]+ {checkpoints} 0$"], check=False,
                              capture_output=True).returncode


def kill(pids: list[int], checkpoints: Path, *, writers_too: bool) -> None:
    if writers_too:
        subprocess.run(["pkill", "-9", "-f", f"writer [0-9]+ {checkpoints}"], check=False)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row for row in rows if row["event"] == kind]


def newest_verified(checkpoints: Path) -> int:
    """The step of the newest checkpoint whose hashes are right, found without the code that chooses; 0: none."""
    return max((manifest.step for folder, manifest in whole_checkpoints(checkpoints)[0]
                if not damage(folder, manifest)), default=0)


def killed_run(case: dict[str, Any], numbers: random.Random) -> dict[str, Any]:
    """Kill as the case says, and finish. [expected and real first step of each start], and how it ended."""
    run = Path(case["run"])
    checkpoints, resumed = run / "checkpoints", []
    for sub_step in [*case["kills"], "end"]:
        expected, starts = newest_verified(checkpoints), len(events(run, "start"))
        pids = start(case["flags"], Path(case["run"] + ".log"), None if sub_step in ("random", "end") else sub_step)
        deadline = time.monotonic() + 120
        while len(events(run, "start")) == starts and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(events(run, "start")) > starts, "the run did not start"
        resumed.append([expected, events(run, "start")[-1]["step"]])
        if sub_step == "end":
            return {"resumed": resumed, "status": [os.waitpid(pid, 0)[1] for pid in pids]}
        if sub_step == "random":
            time.sleep(numbers.uniform(0, case["window_s"]))
        else:  # rank 0 ends itself, or its writer does
            while time.monotonic() < deadline and (writer_of_rank_0(checkpoints) if case["async"]
                                                   else is_alive(pids[0])):
                time.sleep(0.02)
            assert time.monotonic() < deadline, f"{sub_step} was not reached"
        kill(pids, checkpoints, writers_too=numbers.random() < 0.5)
        wait_for_writers(checkpoints, timeout_s=60)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    for operator in ("FusedAdamBuilder", "CPUAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder"):
        if get_accelerator().create_op_builder(operator).is_compatible(verbose=False):
            get_accelerator().create_op_builder(operator).load(verbose=False)
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for case in cases:
        begin = time.monotonic()
        if "reference" in case:
            statuses = [os.waitpid(pid, 0)[1] for pid in start(case["flags"], Path(case["run"] + ".log"), None)]
            results[case["name"]] = {"status": statuses}
        else:
            results[case["name"]] = killed_run(case, random.Random(case["name"]))
        print(f"{case['name']}: {time.monotonic() - begin:.1f} s", flush=True)
    Path(sys.argv[2]).write_text(json.dumps(results))
