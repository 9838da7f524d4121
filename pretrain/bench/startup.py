"""--what startup: time from the start of the process to the end of its first training step, in phases.

A resume and the rejection of wrong input are measured too.
"""

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from pretrain.bench.processes import BaselineJob, BenchContext, ReportProgress, baseline_environment
from pretrain.bench.report import BenchSection, spread
from pretrain.distributed.process import ROOT, free_port
from pretrain.errors import REJECTED

# phase -> the line of a run's output that ends the phase
_PHASES = {"launcher, flags, checks": r"loading torch", "imports": r"connecting ", "process group": r"building ",
           "engine, data": r"[\d.,]+ M parameters; ", "first step": r"step "}
_REJECTION = "rejected, exit code 2"
# set by launchers; train.py restarts itself with jemalloc
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
                  "LD_PRELOAD")


def startup(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure the time until a run prints the line of its first step, and until wrong input is rejected.

    Each run has one rank. The first start of each command is not counted, because it fills the page cache and may
    compile operators; it also saves the checkpoint for the runs that resume.
    """
    job, repetitions = context.job("start", "project.project"), context.settings.repetitions
    run, resumed = context.folder / "start-run", context.folder / "resume-run"
    commands = _commands(job, run, resumed)
    ends: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    failures: dict[str, str] = {}
    for number in range(repetitions + 1):
        report(f"start {number} of {repetitions}" if number else "first start, not counted")
        for name, words in commands.items():
            if name in failures:
                continue
            shutil.rmtree(run, ignore_errors=True)
            saves = number == 0 and words[-1] == f"--save={resumed}"
            try:
                times = _ends_of_phases([*words, "--exit_at_step=1"] if saves else words, job,
                                        context.settings.timeout_s, is_rejected=name == _REJECTION)
                if saves and not any((resumed / "checkpoints").glob("global_step*")):
                    raise TimeoutError("it saved no checkpoint")
                ends[name] += [times] if number else []
            except TimeoutError as error:
                failures[name] = f"{name}: {error}"
    return _section({name: times for name, times in ends.items() if times}, list(failures.values()), repetitions)


def _section(ends: dict[str, list[dict[str, float]]], failures: list[str], repetitions: int) -> BenchSection:
    seconds = {name: [max(times.values()) for times in starts] for name, starts in ends.items()}
    phases = {name: {phase: statistics.median(_duration(times, phase) for times in starts) for phase in starts[0]}
              for name, starts in ends.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [[name, f"{medians[name]:.1f} s", f"{spread(values):.1%}",
             *(f"{phases[name][phase]:.2f} s" if phase in phases[name] else "" for phase in _PHASES)]
            for name, values in seconds.items()]
    return BenchSection("startup", "From process start to the end of the first step, or of the rejection",
                        ["", "median", "spread", *_PHASES], rows,
                        [f"{repetitions} starts of each. The phases are medians of their own."], failures,
                        {"seconds": seconds, "phases": phases, "median_s": medians})


def _duration(ends: dict[str, float], phase: str) -> float:
    return ends[phase] - max((end for end in ends.values() if end < ends[phase]), default=0.0)


def _commands(job: BaselineJob, run: Path, resumed: Path) -> dict[str, list[str]]:
    """Return the commands by name. They replace flags of the job: the last flag of a name counts."""
    python, program = sys.executable, str(ROOT / "pretrain" / "train.py")
    every_step = [*job.flags, "--log_interval=1"]
    flags = [*every_step, f"--save={run}"]
    launcher = [str(Path(python).with_name("deepspeed")), "--master_port", str(free_port()), "--num_accelerators", "1"]
    return {"python pretrain/train.py": [python, program, *flags],
            "the same, resumed": [python, program, *every_step, f"--save={resumed}"],
            "ds-pretrain": [python, "-m", "pretrain.cluster.ds_pretrain", "--num_gpus", "1", *flags],
            "deepspeed pretrain/train.py": [*launcher, program, *flags],
            _REJECTION: [python, program, *flags, f"--train_data={run / 'missing'}"]}


def _ends_of_phases(words: list[str], job: BaselineJob, timeout_s: float, *, is_rejected: bool) -> dict[str, float]:
    """Start a run, return the seconds until the end of each phase, and kill the run.

    Raises TimeoutError if the run prints no line of a first step. A rejected run has one phase: it ends with its
    process.
    """
    ends: dict[str, float] = {}
    last, begin = "", time.perf_counter()
    with contextlib.closing(_output(words, job, timeout_s)) as lines:
        for line in lines:
            last = line.strip() or last
            phase = next((phase for phase, pattern in _PHASES.items() if re.match(pattern, line)), None)
            if phase is not None:
                ends.setdefault(phase, time.perf_counter() - begin)
            if "first step" in ends and "--exit_at_step=1" not in words:
                break
    if is_rejected and last == f"exit code {REJECTED}":
        return {"rejection": time.perf_counter() - begin}
    if "first step" not in ends:
        raise TimeoutError(f"it ended before its first step, or exceeded the time-out: {last[:300]}")
    return ends


def _output(words: list[str], job: BaselineJob, timeout_s: float) -> Generator[str, None, None]:
    """Start a command; yield its lines as soon as they are complete, and at the end its exit code. Then kill it."""
    environ: dict[str, Any] = {name: value for name, value in baseline_environment(job, 0, free_port()).items()
                               if name not in _NOT_INHERITED or os.environ.get(name) == value}
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=environ, text=True, errors="replace") as process:
        timer = threading.Timer(timeout_s, _kill_with_children, [process])
        timer.start()
        try:
            assert process.stdout is not None
            yield from process.stdout
            yield f"exit code {process.wait()}"
        finally:
            timer.cancel()
            _kill_with_children(process)


def _kill_with_children(process: "subprocess.Popen[str]") -> None:
    """Kill a process and all its descendants; a launcher may start its ranks in another process group."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
