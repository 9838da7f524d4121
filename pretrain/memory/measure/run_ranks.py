"""Start and watch the ranks of a measured run on this machine, and explain the failure of one."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.distributed.process import ROOT, free_port, package_environment
from pretrain.errors import ConfigError
from pretrain.memory.measure.out_of_memory import tells_out_of_memory

RANK_MODULE = "pretrain.memory.measure.measure_rank"
_OTHERS_S = 3.0  # for the other ranks to fail too, once one has
_LAST_LINES = 5
_LINE_CHARACTERS = 300
_REJECTED = 2  # exit code


@dataclass(frozen=True)
class FailedRank:
    """A rank of a measured run that did not end well."""

    rank: int
    code: int | None  # negative: a signal's number; None: it was still running when the time was over
    reason: str  # the line that it wrote about its own error; "": none
    lines: tuple[str, ...]  # the last ones of its output

    @classmethod
    def of(cls, rank: int, code: int | None, folder: Path) -> "FailedRank":
        """From the files that the rank has left in the run's folder."""
        error = folder / f"job.error.{rank}"
        log = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip()[:_LINE_CHARACTERS] for line in log.splitlines() if line.strip()]
        return cls(rank, code, error.read_text().strip() if error.is_file() else "", tuple(lines[-_LAST_LINES:]))

    @property
    def port_was_taken(self) -> bool:
        """Whether another program has taken the ranks' port since it was chosen."""
        return "MASTER_PORT" in self.reason or "EADDRINUSE" in self.reason

    def severity(self) -> int:
        """The lower, the nearer to the cause: ranks fail in their collectives once another one is gone."""
        if self.code is not None and self.code < 0:
            return 0
        if self.code == _REJECTED or tells_out_of_memory(self.reason):
            return 1
        return 2


def run_ranks(folder: Path, world_size: int, timeout_s: float) -> list[FailedRank]:
    """Run all ranks to their end, each with its output in a file. Returns those that failed by themselves.

    When one fails, the others are ended: they would wait for it.
    """
    port, processes = free_port(), []
    try:
        for rank in range(world_size):
            with open(folder / f"rank{rank}.log", "wb") as log:
                processes.append(subprocess.Popen(
                    [sys.executable, "-u", "-m", RANK_MODULE, str(folder / "job.json")], cwd=ROOT,
                    env=_environment(rank, world_size, port), stdout=log, stderr=log, start_new_session=True))
        in_time = _wait(processes, timeout_s)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not in_time:
        return [FailedRank.of(rank, None, folder) for rank, code in enumerate(codes) if code is None]
    return [FailedRank.of(rank, code, folder) for rank, code in enumerate(codes) if code]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher would set for a rank on this machine."""
    size = str(world_size)
    return {**package_environment(), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_SIZE": size,
            "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _wait(processes: "list[subprocess.Popen[bytes]]", timeout_s: float) -> bool:
    """Wait until all have ended, or one has failed and the others had a moment to fail too. False: timed out."""
    deadline, failed = time.monotonic() + timeout_s, False
    while None in (codes := [process.poll() for process in processes]):
        if not failed and any(codes):
            failed, deadline = True, time.monotonic() + _OTHERS_S
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.05)
    return True


def failure(name: str, rank: FailedRank, oom_kills: int | None) -> ConfigError:
    """The reason that the rank gave, or how it ended and its last lines. Memory is blamed only on evidence.

    Args:
        oom_kills: processes that the kernel killed for lack of memory during the run; None: it does not say.
    """
    if rank.code == _REJECTED and rank.reason:
        return ConfigError.from_line(rank.reason)
    said = " | ".join(rank.lines) or "no output"
    if rank.code is None:
        return ConfigError(f"measure {name}", found=f"rank {rank.rank} still running when the time was over, last "
                           f"lines: {said}", expected="a few steps")
    out_of_memory = tells_out_of_memory(f"{rank.reason} {said}") or (rank.code == -signal.SIGKILL and bool(oom_kills))
    return ConfigError(f"measure {name}", found=f"rank {rank.rank} {_ending(rank.code, oom_kills)}"
                       f"{f': {rank.reason}' if rank.reason else ''}; its last lines: {said}", expected="a few steps",
                       remedy="with fewer layers or a smaller micro-batch it may fit" if out_of_memory else "")


def _ending(code: int, oom_kills: int | None) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"failed with exit code {code}"
    if code != -signal.SIGKILL:
        return f"ended by {signal.Signals(-code).name}"
    if oom_kills is None:
        return "killed by SIGKILL, sent by another process, or by the kernel for lack of memory"
    return "killed by the kernel for lack of memory" if oom_kills else \
        "killed by SIGKILL, sent by another process (the kernel counts no kill for lack of memory)"
