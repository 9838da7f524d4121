"""--what startup: from the start of the process to the end of its first step."""

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

from pretrain.bench.processes.baseline_job import Job, Workshop
from pretrain.bench.processes.baseline_process import ContenderError, environment
from pretrain.bench.processes.interleave import Say, Section, spread
from pretrain.distributed.process import ROOT, free_port


def startup(workshop: Workshop, say: Say) -> Section:
    """`python pretrain/train.py` and the `deepspeed` launcher on one rank, until the line of step 1 is printed.

    A first start of each, which may compile operators and fill the page cache, is not counted.
    """
    job = workshop.job("start", "project")
    program = str(ROOT / "pretrain" / "train.py")
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "1"]
    commands = {"python pretrain/train.py": [sys.executable, program],
                "deepspeed pretrain/train.py": [*launcher, program]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    failures: list[str] = []
    for number in range(workshop.settings.rounds + 1):
        say(f"start {number} of {workshop.settings.rounds}" if number else "a first start")
        for name, command in commands.items():
            if any(line.startswith(name) for line in failures):
                continue
            try:
                times[name].append(_first_step_s(name, command, job, workshop))
            except ContenderError as error:
                failures.append(str(error))
    times = {name: values[1:] for name, values in times.items() if len(values) > 1}
    rows = [[name, f"{statistics.median(values):.1f} s", f"{spread(values):.1%}"] for name, values in times.items()]
    return Section("startup", "From process start to the end of the first step",
                   ["", "median", "rounds differ by"], rows, [f"{workshop.settings.rounds} starts of each."], failures,
                   {"seconds": times, "median_s": {name: statistics.median(values) for name, values in times.items()}})


def _first_step_s(name: str, command: list[str], job: Job, workshop: Workshop) -> float:
    """Seconds until the line "step 1/..."; the run is then ended."""
    run = workshop.folder / "start-run"
    shutil.rmtree(run, ignore_errors=True)
    environ = environment(job, 0, free_port())
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        environ.pop(variable)  # the launcher's own
    port = ["--master_port", environ["MASTER_PORT"]] if "deepspeed" in Path(command[0]).name else []
    words = [command[0], *port, *command[1:], *job.flags]
    log, start = workshop.folder / "start.log", time.perf_counter()
    with open(log, "wb") as stderr, subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                     stderr=stderr, cwd=workshop.folder, env=environ) as process:
        try:
            return _seconds_until_line(process, b"step ", start, workshop.settings.timeout_s)
        except TimeoutError as error:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise ContenderError(name, f"{error}{': ' + said[-1][:300] if said else ''}") from None
        finally:
            _end_all(process)


def _seconds_until_line(process: "subprocess.Popen[bytes]", first: bytes, start: float, timeout_s: float) -> float:
    assert process.stdout is not None
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(start + timeout_s - time.perf_counter(), 0)):
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise TimeoutError(f"ended with {process.wait()} before its first step")
            text += chunk
            if any(line.startswith(first) for line in text.split(b"\n")):
                return time.perf_counter() - start
    raise TimeoutError(f"no first step in {timeout_s:g} s")


def _end_all(process: "subprocess.Popen[bytes]") -> None:
    """The launcher and its ranks, which need not be of one group."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
