"""Plant slow ranks in real runs of 4 ranks, and count what the runs name.

    python -m tests.extensions.slow_ranks.plant --help

A tiny GPT-2-style model is trained on CPUs. All ranks are healthy in the first 32 blocks, unless --from_start.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.extensions.slow_ranks.change import SLOW_RANK
from pretrain.extensions.slow_ranks.rank_times import LOAD, TIMES, RankTimes
from pretrain.extensions.slow_ranks.slow_ranks import BLOCK_S, LEFT_OUT, Blocks
from pretrain.monitor.read_run_folder import read_events, read_rows
from pretrain.paths import STOP_FILE
from tests.conftest import write_corpus
from tests.extensions.slow_ranks.rank_network import Network
from tests.support.cases import config, flags
from tests.support.launch import ROOT, free_port, rank_environment

HEALTHY_BLOCKS = 32  # before a rank becomes slow
SLOW_MBIT = 20
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": config(stage, precision="bf16", accumulation=1) for stage in range(4)},
    "pipeline2": config(1, precision="bf16", stages=2, accumulation=2),
    "pipeline4": config(0, precision="bf16", stages=4, accumulation=4)}
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
# a module that the ranks import: it sets the length of blocks, and delays the reads of data of one rank, once the file
# "slow" exists
MODULE = """
import os, time
from pathlib import Path
if os.environ.get("RANK") == "0":
    from pretrain.extensions.slow_ranks.watch import SlowLinks
    from pretrain.extensions.slow_ranks.slow_ranks import SlowRanks
    for watch in (SlowLinks, SlowRanks):
        watch.__init__.__kwdefaults__["block_s"] = float(os.environ["BLOCK_S"])
if os.environ.get("RANK") == os.environ.get("SLOW_READS_RANK"):
    from pretrain.data.loader import Loader
    step = Loader.step
    def slow(self, *args):
        if Path(os.environ["SLOW_READS_FILE"]).exists():
            time.sleep(float(os.environ["SLOW_READS_S"]))
        return step(self, *args)
    Loader.step = slow
"""


class Ranks:
    """Processes of one run, with the output of each in `folder`."""

    def __init__(self, folder: Path, layout: str, *, ranks: int = 4, log_interval: int = 2,
                 environ: dict[str, str] | None = None, block_s: float = BLOCK_S, network: Network | None = None,
                 **more: Any) -> None:
        self.folder, self.run, self.network = folder, folder / "run", network
        (folder / "modules").mkdir(parents=True, exist_ok=True)
        (folder / "modules" / "sitecustomize.py").write_text(MODULE)
        environ = {**(environ or {}), "PYTHONPATH": f"{folder / 'modules'}{os.pathsep}{ROOT}", "BLOCK_S": str(block_s)}
        values = flags(write_corpus(folder / "corpus"), hidden=32, layers=4, steps=10**6, **more)
        (folder / "ds.json").write_text(json.dumps(LAYOUTS[layout]))
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, str(ROOT / "pretrain/train.py"), "--deepspeed_config", "ds.json", *words,
                   "--log_interval", str(log_interval), "--save", "run", "--save_interval", "0", "--eval_interval", "0"]
        port = free_port()
        self.processes = []
        for rank in range(ranks):
            with (folder / f"rank{rank}.log").open("w") as log:
                prefix, at = network.of_rank(rank) if network is not None else ([], {})
                self.processes.append(subprocess.Popen(
                    [*prefix, *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                    env={**rank_environment(rank, ranks, port), **environ, **at}))

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def wait_for_rows(self, count: int = 1) -> None:
        """Return when the run has logged this number of times."""
        while len(rows_of(self.run)) < count:
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError((self.folder / "rank0.log").read_text()[-3000:])
            time.sleep(0.2)

    def wait_for_blocks(self, count: int, block_s: float) -> None:
        """Return when the run has trained for this number of blocks."""
        blocks = Blocks(block_s)
        while blocks.count < count:
            time.sleep(0.5)
            blocks = Blocks(block_s)
            for row in rows_of(self.run)[LEFT_OUT:]:
                blocks.add(row)

    def stop_after(self, seconds: float, *, until_found: bool = False) -> list[dict[str, Any]]:
        """Let the run train for this time, or until it names a slow rank, and stop it. Returns these events."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until_found and self._events()):
            time.sleep(1)
        (self.run / STOP_FILE).touch()
        for process in self.processes:
            process.wait()
        return self._events()

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"].startswith(SLOW_RANK)]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def rows_of(run: Path) -> list[RankTimes]:
    """Return the rows of rank_times.jsonl of a run that has one start."""
    return [RankTimes(row["step"], row["steps"], row["step_ms"], {key: np.array(row["ms"][key]) for key in TIMES},
                      {key: np.array(row["load"].get(key, [0.0] * len(row["ms"]["own"]))) for key in LOAD})
            for row in read_rows(run / "rank_times.jsonl") if "own" in row.get("ms", {})]


def stop_in_each_row(run: Path, pid: int, is_over: Callable[[], bool], *, steps: float = 2.0) -> None:
    """Stop a process once in each row, for the time of some steps before: on a busy machine steps are longer."""
    healthy_s = float(np.median([row.step_ms for row in rows_of(run)[1:]] or [1000])) / 1e3
    while not is_over():
        rows = len(rows_of(run))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(steps * healthy_s)
            os.kill(pid, signal.SIGCONT)
        while len(rows_of(run)) == rows and not is_over():
            time.sleep(0.05)


@contextlib.contextmanager
def stopped(ranks: Ranks, rank: int) -> Iterator[None]:
    """Stop a rank for a part of the time."""
    over = threading.Event()
    thread = threading.Thread(target=stop_in_each_row, args=(ranks.run, ranks.pid(rank), over.is_set))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def niced(ranks: Ranks, rank: int) -> Iterator[None]:
    """Give a rank the lowest priority, on one CPU with a busy loop."""
    pid = ranks.pid(rank)
    with _busy(1, cpu=0):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {0})
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
        yield


@contextlib.contextmanager
def throttled(ranks: Ranks, rank: int, *, cpus: float = 0.03) -> Iterator[None]:
    """Move a rank to a control group with a quota of a part of a CPU. Needs version 1 of these groups, and root."""
    group = CPU_GROUPS / f"slow-rank-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(cpus * 1e5)))
        (group / "cgroup.procs").write_text(str(ranks.pid(rank)))
        yield
    finally:
        for word in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CPU_GROUPS / "cgroup.procs").write_text(word)
        group.rmdir()


@contextlib.contextmanager
def slow_reads(ranks: Ranks, rank: int) -> Iterator[None]:
    """Let each read of data take longer, in a rank with the module MODULE."""
    (ranks.folder / "slow").touch()
    yield


@contextlib.contextmanager
def slow_link(ranks: Ranks, rank: int) -> Iterator[None]:
    """Limit the network interface of a rank."""
    assert ranks.network is not None
    ranks.network.slow_down(rank, SLOW_MBIT)
    yield


@contextlib.contextmanager
def _busy(processes: int, *, cpu: int | None = None) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        for loop in loops:
            if cpu is not None:
                os.sched_setaffinity(loop.pid, {cpu})
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


PLANTS: dict[str, Callable[[Ranks, int], contextlib.AbstractContextManager[None]]] = {
    "stopped": stopped, "niced": niced, "throttled": throttled, "slow_reads": slow_reads,
    "slow_link": slow_link}
EXPECTED = {"stopped": "stopped", "niced": "other load", "throttled": "throttling", "slow_reads": "data",
            "slow_link": "network link"}


def plant(folder: Path, kind: str, layout: str, rank: int, *, seconds: float, from_start: bool = False,
          block_s: float = BLOCK_S) -> tuple[list[dict[str, Any]], float]:
    """Train with a slow rank, and return the events, and the seconds after which the first came."""
    environ = {"SLOW_READS_RANK": str(rank), "SLOW_READS_FILE": str(folder / "slow"), "SLOW_READS_S": "0.5"} \
        if kind == "slow_reads" else {}
    with contextlib.ExitStack() as stack:
        network = Network(4, stack) if kind == "slow_link" else None
        ranks = Ranks(folder, layout, environ=environ, block_s=block_s, network=network)
        stack.callback(ranks.kill)
        ranks.wait_for_rows()
        if not from_start:
            ranks.wait_for_blocks(HEALTHY_BLOCKS, block_s)
        began = time.time()
        with PLANTS[kind](ranks, rank):
            events = ranks.stop_after(seconds, until_found=True)
        return events, (events[0]["time"] if events else time.time()) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=0, help="number of runs without a slow rank")
    parser.add_argument("--plant", nargs="*", default=[], choices=list(PLANTS), help="kinds of slow ranks")
    parser.add_argument("--layouts", nargs="*", default=["zero1"], choices=list(LAYOUTS))
    parser.add_argument("--load", type=int, default=0, help="busy loops on this machine during healthy runs")
    parser.add_argument("--blocks", type=int, default=100, help="length of a healthy run")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run with a slow rank")
    parser.add_argument("--from_start", action="store_true", help="the rank is slow from the first logged step on")
    parser.add_argument("--block_s", type=float, default=BLOCK_S, help="seconds of training that are one block")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs remain")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        alarms = 0
        for number in range(arguments.healthy):
            layout = arguments.layouts[number % len(arguments.layouts)]
            with _busy(arguments.load):
                ranks = Ranks(folder / f"healthy{number}", layout, block_s=arguments.block_s, log_interval=1)
                try:
                    ranks.wait_for_rows()
                    ranks.wait_for_blocks(arguments.blocks, arguments.block_s)
                    events = ranks.stop_after(0)
                finally:
                    ranks.kill()
            alarms += len(events)
            print(f"healthy {number + 1:2} {layout} (load {os.getloadavg()[0]:.0f}, "
                  f"{arguments.blocks} blocks): {_text(events)}", flush=True)
        if arguments.healthy:
            print(f"{alarms} alarms in {arguments.healthy} healthy runs")
        for kind in arguments.plant:
            for number, layout in enumerate(arguments.layouts):
                rank = (number + 1) % 4
                events, after_s = plant(folder / f"{kind}_{layout}", kind, layout, rank, seconds=arguments.seconds,
                                        from_start=arguments.from_start, block_s=arguments.block_s)
                first = next(iter(events), None)
                right = first is not None and first["ranks"] == [rank]
                named = right and first is not None and first["kind"] == EXPECTED[kind]
                print(f"{kind} rank {rank} {layout}: {'found' if right else 'NOT FOUND'}"
                      f"{'' if not right or named else ', OTHER KIND'} after {after_s:.0f} s (load "
                      f"{os.getloadavg()[0]:.0f}): {_text(events)}", flush=True)


def _text(events: list[dict[str, Any]]) -> str:
    return "; ".join(f"{event['event']} step {event['step']} {event['reason']}" for event in events) or "nothing"


if __name__ == "__main__":
    main()
