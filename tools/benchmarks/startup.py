"""--what startup: time from the start of the process to the end of its first training step, in phases.

A resume and the rejection of wrong input are measured too.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from pretrain.distributed.process import PROGRAM, ROOT, free_port
from pretrain.errors import REJECTED
from tools.benchmarks.processes import BaselineJob, BenchContext, ReportProgress, baseline_environment
from tools.benchmarks.report import BenchSection, spread

# phase -> the line of a run's output that ends the phase
_PHASES = {"launcher, flags, checks": r"loading torch", "imports": r"connecting ", "process group": r"building ",
           "engine, data": r"[\d.,]+ M parameters; ", "first step": r"step "}
_REJECTION = "rejected, exit code 2"
# set by launchers; train.py restarts itself with jemalloc
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
                  "LD_PRELOAD")


def startup(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure the time until a run prints the line of its first step, and until wrong input is rejected.

    Each run has one rank, and ends after one step. The first start of each command is not counted, because it fills the
    page cache and may compile operators; it also saves the checkpoint for the runs that resume.
    """
    job, settings = context.job("start", "project.project"), context.settings
    resumed = context.folder / "resume-run"
    ends: dict[str, list[dict[str, float]]] = {name: [] for name in _commands(job, resumed, step=0)}
    failures: dict[str, str] = {}
    for number in range(settings.repetitions + 1):
        report(f"start {number} of {settings.repetitions}" if number else "first start, not counted")
        for name, words in _commands(job, resumed, step=number + 1).items():
            if name in failures:
                continue
            shutil.rmtree(job.folder, ignore_errors=True)
            try:
                times = _ends_of_phases(words, job, settings.timeout_s, is_rejected=name == _REJECTION)
                ends[name] += [times] if number else []
            except TimeoutError as error:
                failures[name] = f"{name}: {error}"
    return _section({name: times for name, times in ends.items() if times}, list(failures.values()),
                    settings.repetitions)


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


def _commands(job: BaselineJob, resumed: Path, *, step: int) -> dict[str, list[str]]:
    """Return the commands by name. They replace flags of the job: the last flag of a name counts.

    `step`: the step that the resumed run trains next; the others are new runs.
    """
    python, program = sys.executable, str(ROOT / "pretrain" / "train.py")
    flags = [*job.flags, "--log_interval=1", "--exit_at_step=1"]
    launcher = [str(Path(python).with_name("deepspeed")), "--master_port", str(free_port()), "--num_accelerators", "1"]
    return {"python pretrain/train.py": [python, program, *flags],
            "the same, resumed": [python, program, *flags, f"--save={resumed}", f"--exit_at_step={step}"],
            "ds-pretrain": [python, PROGRAM, "--num_gpus", "1", *flags],
            "deepspeed pretrain/train.py": [*launcher, program, *flags],
            _REJECTION: [python, program, *flags, f"--train_data={job.folder / 'missing'}"]}


def _ends_of_phases(words: list[str], job: BaselineJob, timeout_s: float, *, is_rejected: bool) -> dict[str, float]:
    """Run a command, and return the seconds until the end of each phase.

    Raises TimeoutError if the run prints no line of a first step. A rejected run has one phase: it ends with its
    process.
    """
    environ = {name: value for name, value in baseline_environment(job).items()
               if name not in _NOT_INHERITED or os.environ.get(name) == value}
    ends: dict[str, float] = {}
    last, begin = "", time.perf_counter()
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=environ, text=True, errors="replace") as process:
        timer = threading.Timer(timeout_s, process.kill)  # the ranks of a launcher notice its end
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            phase = next((phase for phase, pattern in _PHASES.items() if re.match(pattern, line)), None)
            if phase is not None:
                ends.setdefault(phase, time.perf_counter() - begin)
        code = process.wait()
        timer.cancel()
    if is_rejected and code == REJECTED:
        return {"rejection": time.perf_counter() - begin}
    if "first step" not in ends:
        raise TimeoutError(f"it ended before its first step, or exceeded the time-out: {last[:300]}")
    return ends
