"""--what startup: time from the start of the process to the end of its first training step."""

import contextlib
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.baseline_process import BaselineError, baseline_environment
from pretrain.bench.processes.context import BenchContext
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread
from pretrain.distributed.process import ROOT, free_port


def startup(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure the time until a run prints the line of step 1, with `python pretrain/train.py` and with `deepspeed`.

    Each run has one rank. The first start of each command is not counted, because it fills the page cache and may
    compile operators.
    """
    job, repetitions = context.job("start", "project"), context.settings.repetitions
    program = str(ROOT / "pretrain" / "train.py")
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "1"]
    commands = {"python pretrain/train.py": [sys.executable, program],
                "deepspeed pretrain/train.py": [*launcher, program]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    failures: dict[str, str] = {}
    for number in range(repetitions + 1):
        report(f"start {number} of {repetitions}" if number else "first start, not counted")
        for name, command in commands.items():
            if name in failures:
                continue
            try:
                times[name].append(_first_step_s(name, command, job, context))
            except BaselineError as error:
                failures[name] = str(error)
    times = {name: values[1:] for name, values in times.items() if len(values) > 1}
    rows = [[name, f"{statistics.median(values):.1f} s", f"{spread(values):.1%}"] for name, values in times.items()]
    return BenchSection("startup", "From process start to the end of the first step", ["", "median", "spread"], rows,
                        [f"{repetitions} starts of each."], list(failures.values()),
                        {"seconds": times,
                         "median_s": {name: statistics.median(values) for name, values in times.items()}})


def _first_step_s(name: str, command: list[str], job: BaselineJob, context: BenchContext) -> float:
    """Start a run, return the seconds until it prints its first line "step ...", and kill the run."""
    shutil.rmtree(context.folder / "start-run", ignore_errors=True)
    environ = baseline_environment(job, 0, free_port())
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        environ.pop(variable)  # the launcher sets them
    port = ["--master_port", environ["MASTER_PORT"]] if "deepspeed" in Path(command[0]).name else []
    words = [command[0], *port, *command[1:], *job.flags]
    log, start = context.folder / "start.log", time.perf_counter()
    with open(log, "wb") as stderr, subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                     stderr=stderr, cwd=context.folder, env=environ) as process:
        try:
            return _seconds_until_line(process, b"step ", start, context.settings.timeout_s)
        except TimeoutError as error:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise BaselineError(name, f"{error}: {lines[-1][:300]}" if lines else str(error)) from None
        finally:
            _kill_with_children(process)


def _seconds_until_line(process: "subprocess.Popen[bytes]", prefix: bytes, start: float, timeout_s: float) -> float:
    """Return the seconds until a line of the output starts with `prefix`.

    Raises TimeoutError if there is no such line within `timeout_s`, or if the process exits before.
    """
    assert process.stdout is not None
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(start + timeout_s - time.perf_counter(), 0)):
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise TimeoutError(f"exited with code {process.wait()} before its first step")
            text += chunk
            if any(line.startswith(prefix) for line in text.split(b"\n")):
                return time.perf_counter() - start
    raise TimeoutError(f"no first step within {timeout_s:g} s")


def _kill_with_children(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all its descendants; a launcher may start its ranks in another process group."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
