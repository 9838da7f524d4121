"""Checks of a SLURM job before and after its ranks run: time limit, failed nodes, and whether to requeue the job.

launch/slurm/pretrain.sbatch calls `python -m pretrain.cluster.slurm_job before` on every node. If the run's exit code
is not 0, the script calls `python -m pretrain.cluster.slurm_job after` on the first node, unless the job was cancelled.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.run_checkpoints import newest_step
from pretrain.checkpoint.load.resume import checkpoints_folder
from pretrain.checkpoint.load.start import check_start
from pretrain.checkpoint.save.commit import next_checkpoint_bytes
from pretrain.cli import Parser, run_main, say
from pretrain.cluster.fewer_hosts import slow_hosts_of
from pretrain.cluster.outcome import read_patiently
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import detect_device
from pretrain.distributed.print_error import print_error
from pretrain.distributed.world import World, integer_variable
from pretrain.errors import NO_RESTART, REJECTED, ConfigError
from pretrain.monitor.read_run_folder import is_number, read_events, read_metrics, read_rows
from pretrain.paths import STOP_FILE
from pretrain.resilience.run_lock import reject_second_start
from pretrain.stored_json import build

RECORD = "slurm.jsonl"
MAX_STARTS_WITHOUT_PROGRESS = 3
_DISK_TEST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class JobStart:
    """Row of RUN/slurm.jsonl: one start of a SLURM job."""

    job: str  # SLURM job id
    nodes: list[str]
    step: int  # step from which this start resumed
    time: float  # when the start began, in seconds since 1970


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks of `before` or `after`, and return the exit code. Raises ConfigError.

    `before`: 0 if this node accepts the run, otherwise 2 after one line that names the node. `after`: 0 if the job
    should be requeued, otherwise 1.
    """
    parser = Parser(prog="python -m pretrain.cluster.slurm_job")
    parser.add_argument("when", choices=("before", "after"))
    parser.add_argument("--world_size", type=int, default=1, help="number of ranks of the run")
    parser.add_argument("--signal_seconds", type=int, default=0, help="SECONDS of #SBATCH --signal=B:USR1@SECONDS")
    parser.add_argument("--exit_code", type=int, default=1, help="exit code of the run")
    own, train_flags = parser.parse_known_args(argv)
    if own.when == "after":
        return after(Path(parse_arguments(train_flags).save), os.environ, exit_code=own.exit_code)
    node = integer_variable(os.environ, "SLURM_NODEID") if "SLURM_NODEID" in os.environ else 0
    try:
        args = parse_arguments(train_flags)
        if node == 0:
            reject_second_start(Path(args.save))
        plan = check_start(args, world_size=own.world_size, device=detect_device()).plan
        if node == 0:
            before(plan, os.environ, signal_s=own.signal_seconds)
    except ConfigError as error:
        print_error(World(rank=node, size=node + 1, local_rank=0, local_size=1, launcher="slurm"), error)
        return REJECTED
    return 0


def before(plan: Plan, environ: Mapping[str, str], *, signal_s: int) -> None:
    """Check the time limit, report nodes that failed since the previous start, and record this start.

    Raises ConfigError.
    """
    run, job = Path(plan.args.save), environ["SLURM_JOB_ID"]
    limit_s = parse_slurm_time(_output("squeue", "--noheader", "--jobs", job, "--format", "%L"))
    check_time_limit(limit_s=limit_s, signal_s=signal_s, save_s=save_seconds(plan, run),
                     step_s=slowest_step_seconds(run))
    starts = read_record(run, job)
    nodes = _output("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]).split()
    if starts:
        say(f"start {len(starts) + 1} of job {job}, on {' '.join(nodes)}")
        for line in failed_nodes(starts[-1].nodes, since=starts[-1].time):
            say(line)
    run.mkdir(parents=True, exist_ok=True)
    with open(run / RECORD, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(JobStart(job, nodes, newest_step(checkpoints_folder(plan)), time.time()))) + "\n")


def after(run: Path, environ: Mapping[str, str], *, exit_code: int) -> int:
    """Return 0 if the job should be requeued, otherwise 1. Prints the decision, and slow nodes.

    `before` names lost nodes.
    """
    starts = read_patiently(run, lambda: read_record(run, environ["SLURM_JOB_ID"]), otherwise=list[JobStart]())
    step = read_patiently(run, lambda: newest_step(run / "checkpoints"), otherwise=0)
    reason = NO_RESTART.get(exit_code)
    without_progress = [start for start in starts[-MAX_STARTS_WITHOUT_PROGRESS:] if start.step == step]
    if read_patiently(run, (run / STOP_FILE).exists, otherwise=False):
        reason = f"{run / STOP_FILE} exists"
    if len(without_progress) == MAX_STARTS_WITHOUT_PROGRESS:
        reason = f"{MAX_STARTS_WITHOUT_PROGRESS} starts in a row made no progress beyond step {step}"
    decision = f"the job is not requeued, because {reason}" if reason else "the job goes back to the queue"
    say(f"exit code {exit_code}, step {step}: {decision}")
    slow = slow_hosts_of(read_patiently(run, lambda: read_events(run), otherwise=list[dict[str, Any]]()), {})
    for node, why in slow.items():
        say(f"node {node} was slow: {why}")
    if slow and not reason:
        say(f"to leave it out, run this while the job is pending: scontrol update JobId={environ['SLURM_JOB_ID']} "
            f"ExcNodeList={','.join(slow)}")
    return 1 if reason else 0


def check_time_limit(*, limit_s: float, signal_s: float, save_s: float, step_s: float) -> None:
    """Raise ConfigError if there is too little time for a step and a save, before or after the signal.

    Args:
        limit_s: seconds until the job's time limit.
        signal_s: seconds between the signal and the time limit.
        save_s: seconds that a save takes.
        step_s: seconds that a step takes.
    """
    need_s = step_s + save_s
    if need_s > signal_s:
        raise ConfigError(f"--signal=B:USR1@{signal_s:.0f}", found=f"{signal_s:.0f} s before the time limit",
                          expected=f"at least {need_s:.0f} s, for one step and one save of {save_s:.0f} s",
                          remedy=f"set --signal=B:USR1@{2 * need_s + 60:.0f} in pretrain.sbatch")
    if limit_s <= signal_s + need_s:
        raise ConfigError("--time", found=f"{limit_s:.0f} s",
                          expected=f"more than {signal_s + need_s:.0f} s: {signal_s:.0f} s of --signal, one step and "
                                   f"one save of {save_s:.0f} s",
                          remedy="give a longer limit with sbatch --time=H:MM:SS")


def save_seconds(plan: Plan, run: Path) -> float:
    """Return the seconds of the longest of the last 10 saves.

    Before the first save, estimate them from the checkpoint's size and the disk's speed.
    """
    took = [float(row["seconds"]) for row in read_events(run)
            if row["event"] == "save" and is_number(row.get("seconds"))]
    if took:
        return max(took[-10:])
    folder = next(path for path in (run.absolute(), *run.absolute().parents) if path.is_dir())
    return next_checkpoint_bytes(plan, checkpoints_folder(plan)) / _bytes_per_second(folder)


def slowest_step_seconds(run: Path) -> float:
    """Return the longest step time in the last 10 rows of metrics.jsonl, or 0 if there are none."""
    took = [float(row["step_time_ms"]) / 1000 for row in read_metrics(run)[-10:] if is_number(row.get("step_time_ms"))]
    return max(took, default=0.0)


def _bytes_per_second(folder: Path) -> float:
    """Measure the speed at which one process writes to the folder's disk."""
    path = folder / f".tmp-speed-{os.getpid()}"
    start = time.perf_counter()
    try:
        with open(path, "wb") as file:
            file.write(os.urandom(2**20) * (_DISK_TEST_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return _DISK_TEST_BYTES / (time.perf_counter() - start)


def read_record(run: Path, job: str) -> list[JobStart]:
    """Return the starts of this SLURM job from RUN/slurm.jsonl, oldest first. Damaged rows are skipped."""
    starts = []
    for row in read_rows(run / RECORD):
        with contextlib.suppress(ValueError):
            starts.append(build(JobStart, row))
    return [start for start in starts if start.job == job]


def parse_slurm_time(text: str) -> float:
    """Return the seconds of SLURM's [days-][[hours:]minutes:]seconds; infinity for UNLIMITED. Raises ConfigError."""
    days, _, clock = text.strip().rpartition("-")
    if clock in ("UNLIMITED", "NOT_SET"):
        return float("inf")
    try:
        parts = [int(part) for part in clock.split(":")]
        return int(days or 0) * 86400.0 + sum(part * 60**power for power, part in enumerate(reversed(parts)))
    except ValueError:
        raise ConfigError("squeue", found=repr(text),
                          expected="the remaining time of the job, such as 1-02:03:04") from None


def failed_nodes(nodes: Sequence[str], *, since: float) -> list[str]:
    """Return a line for each node that is down, drained or failing, or whose slurmd started after `since`.

    `since`: time in seconds since 1970.
    """
    text = _output("scontrol", "show", "node", ",".join(nodes), "--oneliner")
    lines = []
    for words in (dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines()):
        state, began = words.get("State", ""), words.get("SlurmdStartTime", "")
        if any(bad in state for bad in ("DOWN", "FAIL", "DRAIN", "NOT_RESPONDING")) or state.endswith("*"):
            lines.append(f"node {words['NodeName']} of the previous start is {state}")
        elif began[:1].isdigit() and time.mktime(time.strptime(began, "%Y-%m-%dT%H:%M:%S")) > since:
            lines.append(f"node {words['NodeName']} of the previous start was lost: its slurmd restarted at {began}")
    return lines


def _output(*command: str) -> str:
    """Return the stdout of a SLURM command. Raises ConfigError if the command fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(command[0], problem=f"the SLURM command failed: {error}",
                          remedy="run this inside a SLURM job") from None


if __name__ == "__main__":
    run_main(main)
