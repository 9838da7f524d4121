"""--what startup: time from the start of the process to the end of its first training step, in phases.

A resume and the rejection of wrong input are measured too.
"""

import contextlib
import os
import re
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.baseline_process import BaselineError, baseline_environment
from pretrain.bench.processes.context import BenchContext
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread
from pretrain.distributed.process import ROOT, free_port
from pretrain.errors import REJECTED

# phase -> the line of a run's output that ends the phase
_PHASES = {"launcher, flags, checks": rb"loading torch", "imports": rb"connecting ", "process group": rb"building ",
           "engine, data": rb"[\d.,]+ M parameters; ", "first step": rb"step "}
_FIRST_STEP = "first step"
# set by launchers; train.py restarts itself with jemalloc
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
                  "LD_PRELOAD")


@dataclass(frozen=True)
class _Start:
    """A command whose start is measured."""

    name: str
    words: list[str]
    run: Path  # its run folder
    resumes: bool = False
    is_rejected: bool = False


def startup(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure the time until a run prints the line of its first step, and until wrong input is rejected.

    Each run has one rank. The first start of each command is not counted, because it fills the page cache and may
    compile operators.
    """
    job, repetitions = context.job("start", "project"), context.settings.repetitions
    starts = _starts(context, job)
    ends: dict[str, list[dict[str, float]]] = {start.name: [] for start in starts}
    failures: dict[str, str] = {}
    for number in range(repetitions + 1):
        report(f"start {number} of {repetitions}" if number else "first start, not counted")
        for start in starts:
            if start.name in failures:
                continue
            try:
                if start.resumes and number == 0:
                    _save_checkpoint(start, job, context)
                times = _ends_of_phases(start, job, context)
                ends[start.name] += [times] if number else []
            except TimeoutError as error:
                failures[start.name] = str(BaselineError(start.name, str(error)))
    return _section({name: times for name, times in ends.items() if times}, list(failures.values()), repetitions)


def _section(ends: dict[str, list[dict[str, float]]], failures: list[str], repetitions: int) -> BenchSection:
    seconds = {name: [max(times.values()) for times in starts] for name, starts in ends.items()}
    phases = {name: {phase: statistics.median(_duration(times, phase) for times in starts) for phase in starts[0]}
              for name, starts in ends.items()}
    rows = [[name, f"{statistics.median(values):.1f} s", f"{spread(values):.1%}",
             *(f"{phases[name][phase]:.2f} s" if phase in phases[name] else "" for phase in _PHASES)]
            for name, values in seconds.items()]
    return BenchSection("startup", "From process start to the end of the first step, or of the rejection",
                        ["", "median", "spread", *_PHASES], rows,
                        [f"{repetitions} starts of each. The phases are medians of their own."], failures,
                        {"seconds": seconds, "phases": phases,
                         "median_s": {name: statistics.median(values) for name, values in seconds.items()}})


def _duration(ends: dict[str, float], phase: str) -> float:
    return ends[phase] - max((end for end in ends.values() if end < ends[phase]), default=0.0)


def _starts(context: BenchContext, job: BaselineJob) -> list[_Start]:
    """Return the commands. They replace flags of the job: the last flag of a name counts."""
    python, program = sys.executable, str(ROOT / "pretrain" / "train.py")
    run, resumed = context.folder / "start-run", context.folder / "resume-run"
    every_step = [*job.flags, "--log_interval=1"]
    flags = [*every_step, f"--save={run}"]
    launcher = [str(Path(python).with_name("deepspeed")), "--master_port", str(free_port()), "--num_accelerators", "1"]
    return [
        _Start("python pretrain/train.py", [python, program, *flags], run),
        _Start("the same, resumed", [python, program, *every_step, f"--save={resumed}"], resumed, resumes=True),
        _Start("ds-pretrain", [python, "-m", "pretrain.cluster.ds_pretrain", "--num_gpus", "1", *flags], run),
        _Start("deepspeed pretrain/train.py", [*launcher, program, *flags], run),
        _Start("rejected, exit code 2", [python, program, *flags, f"--train_data={context.folder / 'missing'}"], run,
               is_rejected=True),
    ]


def _save_checkpoint(start: _Start, job: BaselineJob, context: BenchContext) -> None:
    """Train one step and save it, for the runs that resume. Raises TimeoutError."""
    with _running([*start.words, "--exit_at_step=1"], job, context) as process:
        for _ in _lines(process, time.perf_counter() + context.settings.timeout_s):
            pass
        if not any((start.run / "checkpoints").glob("global_step*")):
            raise TimeoutError(f"exited with code {process.wait()} without a checkpoint")


def _ends_of_phases(start: _Start, job: BaselineJob, context: BenchContext) -> dict[str, float]:
    """Start a run, return the seconds until the end of each phase, and kill the run. Raises TimeoutError.

    A rejected run has one phase, which ends with its process.
    """
    if not start.resumes:
        shutil.rmtree(start.run, ignore_errors=True)
    ends: dict[str, float] = {}
    last, begin = "", time.perf_counter()
    with _running(start.words, job, context) as process:
        for line in _lines(process, begin + context.settings.timeout_s):
            last = line.decode(errors="replace").strip() or last
            phase = next((phase for phase, pattern in _PHASES.items() if re.match(pattern, line)), None)
            if phase is not None and phase not in ends:
                ends[phase] = time.perf_counter() - begin
            if phase == _FIRST_STEP:
                return ends
        code = process.wait()
        if start.is_rejected and code == REJECTED:
            return {"rejection": time.perf_counter() - begin}
        raise TimeoutError(f"exited with code {code} before its first step: {last[:300]}")


@contextlib.contextmanager
def _running(words: list[str], job: BaselineJob, context: BenchContext) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process, yield it, and kill it at the end."""
    environ = baseline_environment(job, 0, free_port())
    environ = {name: value for name, value in environ.items()
               if name not in _NOT_INHERITED or os.environ.get(name) == value}
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=environ) as process:
        try:
            yield process
        finally:
            _kill_with_children(process)


def _lines(process: "subprocess.Popen[bytes]", deadline: float) -> Iterator[bytes]:
    """Yield the lines of a process's output as soon as they are complete. Raises TimeoutError after the deadline."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(deadline - time.perf_counter(), 0)):
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
    raise TimeoutError("it printed no further line within the time-out")


def _kill_with_children(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all its descendants; a launcher may start its ranks in another process group."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
