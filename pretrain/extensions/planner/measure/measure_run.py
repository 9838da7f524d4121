"""Measure the memory of every rank in a short run of a DeepSpeed JSON on this machine.

Each rank is a process of its own, `python -m pretrain.extensions.planner.measure.measure_run REQUEST.json`. It is
started without a launcher, so that its exit code and its output are known. Engine, model and step are as in training.
The tokens are random: memory does not depend on them.

The request is {"args": RunArguments, "tracked_steps": N, "timed_steps": N}. Rank 0 writes REQUEST.result.json. A rank
that fails writes one line to REQUEST.error.RANK.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.child import child_command
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_settings
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import (
    end_process,
    free_port,
    kernel_oom_kills,
    mentions_out_of_memory,
)
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World, running_environment
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError
from pretrain.extensions.planner.measure.rank_memory import RankMemory

RANK_MODULE = "pretrain.extensions.planner.measure.measure_run"
_GRACE_S = 3.0  # seconds that the other ranks have to fail, too, after the first failure
_LAST_LINES = 5
_LINE_CHARACTERS = 300
_REJECTED = 2  # exit code of a rank that rejects the run
_TRACKED_STEPS = 2
_PORT_ATTEMPTS = 3


@dataclass(frozen=True)
class RunMeasurement:
    """Memory of every rank of a run, and its step time."""

    name: str
    ranks: tuple[RankMemory, ...]
    step_time_ms: float  # median over the steps of the slowest rank's time
    layer_times: tuple[int, ...]  # that the engine measured: see Layout

    @classmethod
    def of_results(cls, name: str, results: list[dict[str, Any]]) -> "RunMeasurement":
        """Combine the ranks' results, as `measure_engine` returns them."""
        steps = zip(*(result["step_times_ms"] for result in results), strict=True)
        slowest = [max(times) for times in steps]
        return cls(name, tuple(RankMemory.of_json(result["memory"]) for result in results),
                   statistics.median(slowest) if slowest else 0.0, tuple(results[0]["layer_times"]))


def measure_run(args: RunArguments, world_size: int, *, steps: int = 4, timeout_s: float = 1800) -> RunMeasurement:
    """Start a run of `world_size` ranks on this machine, and wait for its end.

    Args:
        args: flags of `train.py`; data and run folder are not used.
        steps: number of timed steps, after two steps whose memory is tracked.

    Raises:
        ConfigError: `train.py` would reject the run, or a rank failed.
    """
    name = Path(args.deepspeed_config).stem
    check_settings(args, world_size=world_size, device=detect_device())
    request = {"args": asdict(args), "tracked_steps": _TRACKED_STEPS, "timed_steps": steps}
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "request.json").write_text(json.dumps(request))
            kills_before = kernel_oom_kills()
            failed = run_ranks(Path(folder), world_size, timeout_s)
            if not failed:
                return RunMeasurement.of_results(name, json.loads(Path(folder, "request.result.json").read_text()))
            culprit = min(failed, key=FailedRank.severity)
            if culprit.port_was_taken and attempt < _PORT_ATTEMPTS:
                continue
            kills_after = kernel_oom_kills()
            oom_kills = None if kills_before is None or kills_after is None else kills_after - kills_before
            raise failure_error(name, culprit, oom_kills)
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class FailedRank:
    """A rank of a measured run that failed, or that was still running at the timeout."""

    rank: int
    code: int | None  # exit code; negative: number of the signal that ended it; None: still running at the timeout
    reason: str  # the error that the rank reported; "" if it reported none
    lines: tuple[str, ...]  # last lines of its output

    @classmethod
    def of(cls, rank: int, code: int | None, folder: Path) -> "FailedRank":
        """Read the files that the rank wrote into the run's folder."""
        error = folder / f"request.error.{rank}"
        log = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip()[:_LINE_CHARACTERS] for line in log.splitlines() if line.strip()]
        return cls(rank, code, error.read_text().strip() if error.is_file() else "", tuple(lines[-_LAST_LINES:]))

    @property
    def port_was_taken(self) -> bool:
        """True if another program listened on the ranks' port before rank 0 did."""
        return "MASTER_PORT" in self.reason or "EADDRINUSE" in self.reason

    def severity(self) -> int:
        """Sort key: the lowest value is the most likely cause.

        After the first failure, the other ranks fail in their collectives.
        """
        if self.code is not None and self.code < 0:
            return 0
        if self.code == _REJECTED or mentions_out_of_memory(self.reason):
            return 1
        return 2


def run_ranks(folder: Path, world_size: int, timeout_s: float) -> list[FailedRank]:
    """Run all ranks to their end, with the output of each in a file. Return the ranks that failed by themselves.

    When a rank fails, the others are killed soon after, because they would wait for it in a collective.
    """
    port, processes = free_port(), []
    try:
        for rank in range(world_size):
            with open(folder / f"rank{rank}.log", "wb") as log:
                processes.append(subprocess.Popen(
                    child_command(RANK_MODULE, str(folder / "request.json"), options=("-u",)),
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
    """Environment variables of a rank on this machine, as a launcher would set them."""
    size = str(world_size)
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_SIZE": size,
            "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _wait(processes: "list[subprocess.Popen[bytes]]", timeout_s: float) -> bool:
    """Wait until all ranks have exited, at most _GRACE_S after a failure. Return False at the timeout."""
    deadline, failed = time.monotonic() + timeout_s, False
    while None in (codes := [process.poll() for process in processes]):
        if not failed and any(codes):
            failed, deadline = True, time.monotonic() + _GRACE_S
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.05)
    return True


def failure_error(name: str, rank: FailedRank, oom_kills: int | None) -> ConfigError:
    """Return an error with the rank's exit code or signal, the reason that it reported, and its last lines.

    For a rank that rejected the run, the error is the rank's own. The error suggests a smaller run only if there is
    evidence that memory ran out.

    Args:
        name: name of the run.
        oom_kills: processes that the kernel killed for lack of memory during the run. None: the kernel has no counter.
    """
    if rank.code == _REJECTED and rank.reason:
        return ConfigError.from_line(rank.reason)
    output = " | ".join(rank.lines) or "no output"
    if rank.code is None:
        return ConfigError(f"measure {name}", problem=f"rank {rank.rank} was still running at the timeout; its last "
                           f"lines: {output}")
    out_of_memory = mentions_out_of_memory(f"{rank.reason} {output}") or \
        (rank.code == -signal.SIGKILL and bool(oom_kills))
    return ConfigError(f"measure {name}", problem=f"rank {rank.rank} {_exit_description(rank.code, oom_kills)}"
                       f"{f': {rank.reason}' if rank.reason else ''}; its last lines: {output}",
                       remedy="It may fit with fewer layers or a smaller micro-batch" if out_of_memory else "")


def _exit_description(code: int, oom_kills: int | None) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    if code != -signal.SIGKILL:
        return f"was ended by {signal.Signals(-code).name}"
    if oom_kills is None:
        return "was killed by SIGKILL, either from another process or from the kernel for lack of memory"
    return "was killed by the kernel for lack of memory" if oom_kills else \
        "was killed by SIGKILL from another process (the kernel counts no kill for lack of memory)"


def measure_engine(plan: Plan, *, tracked_steps: int, timed_steps: int) -> list[dict[str, Any]]:
    """Build the plan's engine, train, and destroy the engine. Every rank of the process group must call this.

    Returns the results of all ranks, on every rank: {"memory": RankMemory as JSON, "layer_times", "step_times_ms"}.
    """
    import torch.distributed as dist

    from pretrain.distributed.collectives import gather
    from pretrain.engine.attachments import attachments
    from pretrain.engine.build import build_engine
    from pretrain.extensions.planner.measure.observe_steps import observe_steps, time_steps
    from pretrain.extensions.planner.measure.tensor_inventory import nvme_footprint
    from pretrain.memory.storage_tracker import StorageTracker

    tracker = StorageTracker() if detect_device().kind == "cpu" else None
    with tracker or contextlib.nullcontext():
        engine = build_engine(plan)
        memory = observe_steps(engine, plan, steps=tracked_steps, tracker=tracker)
    memory = replace(memory, held=memory.held + nvme_footprint(engine, dist.get_rank()))
    times = time_steps(engine, plan, timed_steps)
    results = gather({"memory": memory.to_json(), "layer_times": list(attachments(engine).layer_times),
                      "step_times_ms": times})
    engine.destroy()
    return results


def _measure_rank(request: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Measure the requested run. Returns every rank's result. Raises ConfigError."""
    plan = check_settings(RunArguments(**request["args"]), world_size=world.size, device=detect_device())
    from pretrain.engine.build import deepspeed_output, remove_swap_files

    with deepspeed_output("error"):
        init_process_group(world)
        try:
            return measure_engine(plan, tracked_steps=request["tracked_steps"], timed_steps=request["timed_steps"])
        finally:
            if world.local_rank == 0:
                remove_swap_files(plan)


def main(path: Path) -> int:
    """Return the exit code: 0; 1 if the run failed; 2 if it was rejected."""
    world = running_environment()
    prepare_deepspeed(detect_device())
    try:
        results = _measure_rank(json.loads(path.read_text()), world)
    except ConfigError as error:
        path.with_suffix(f".error.{world.rank}").write_text(str(error))
        return _REJECTED
    except Exception as error:
        traceback.print_exc()
        path.with_suffix(f".error.{world.rank}").write_text(f"{type(error).__name__}: {error}".splitlines()[0])
        return 1
    if world.rank == 0:
        path.with_suffix(".result.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
