"""Run baselines in processes of their own, in interleaved repetitions.

A baseline is anything that is measured: a part of this project, another training program, or a limit of the machine.
The first repetition of every baseline comes first, then the second one, and so on. While one baseline works, the others
sleep, so changes in the speed of the machine affect all baselines alike.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.bench.settings import BenchSettings
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import Plan, check_run
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import Device, cpu_device, cuda_device, nvcc_fits_torch
from pretrain.distributed.process import free_port, jemalloc_environment, package_environment
from pretrain.model.config import load_model_config

LEARNING_RATE = 1e-4
_EXIT_S = 10  # time for a process to exit after the last request; then it is killed
_DOCUMENT_TOKENS = 5000
ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class BaselineJob:
    """Which baseline runs, with which flags, on which cores."""

    name: str  # as tables show it
    main: str  # "module.function" in pretrain/bench/
    flags: tuple[str, ...]  # flags of pretrain/train.py
    device_kind: str  # "cpu" or "cuda"
    cores: tuple[tuple[int, ...], ...]  # CPU cores of each rank; its length is the number of ranks
    options: dict[str, Any]  # further values for the baseline's main function

    @property
    def is_project(self) -> bool:
        """Return whether the baseline runs this project's code."""
        return self.main.startswith("project.")

    @property
    def device(self) -> Device:
        return cpu_device() if self.device_kind == "cpu" else cuda_device()

    def plan(self) -> Plan:
        """Return the run that the flags describe, validated as by train.py. Raises ConfigError."""
        return check_run(parse_arguments(list(self.flags)), world_size=len(self.cores), device=self.device)


class BenchContext:
    """The temporary folder with the inputs that all baselines share: corpus, DeepSpeed JSONs, model."""

    def __init__(self, settings: BenchSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        preset = settings.preset
        overrides = preset.overrides.format(positions=preset.seq_length)
        self.model = load_model_config(preset.model, overrides or None)
        self._model_flags = [f"--model={preset.model}", *([f"--model_overrides={overrides}"] if overrides else [])]
        write_corpus(folder / "corpus", self.model.vocab_size, max(200 * preset.seq_length, 2_000_000))

    def job(self, name: str, main: str, *, ranks: int = 1, first_part: int = 0, core_parts: int | None = None,
            micro_batch_size: int | None = None, gradient_accumulation_steps: int = 1,
            train_flags: tuple[str, ...] = (), blocks: dict[str, Any] | None = None, **options: Any) -> BaselineJob:
        """Return a job, after writing its DeepSpeed JSON.

        Args:
            ranks: number of processes.
            core_parts: on a CPU, the cores are divided into this number of equal parts, and each rank gets one part
                (default: `ranks`).
            first_part: index of rank 0's part; on CUDA, index of its device.
            train_flags: flags of pretrain/train.py for this job only.
            blocks: further blocks of its DeepSpeed JSON.
        """
        settings, preset = self.settings, self.settings.preset
        path = self.folder / f"{name.replace(' ', '_').replace('/', '_')}.json"
        cores = tuple(tuple(settings.cores_of(first_part + rank, core_parts or ranks)) for rank in range(ranks))
        flags = (f"--deepspeed_config={path}", *self._model_flags, f"--train_data={self.folder / 'corpus'}",
                 "--split=1", f"--seq_length={preset.seq_length}", "--train_steps=1000000", "--lr_schedule=constant",
                 "--lr_warmup_steps=0", "--save_interval=0", "--eval_interval=0", f"--save={path.with_suffix('')}-run",
                 *train_flags)
        job = BaselineJob(name, main, flags, settings.device.kind, cores,
                          {"ds_config": str(path), "precision": settings.precision, "first_device": first_part,
                           **options})
        path.write_text(json.dumps({**_ds_config(settings), **(blocks or {}),
                                    "train_micro_batch_size_per_gpu": micro_batch_size or preset.micro_batch_size,
                                    "gradient_accumulation_steps": gradient_accumulation_steps}))
        return BaselineJob(**{**vars(job), "flags": flags + settings.train_flags}) if job.is_project else job


def _ds_config(settings: BenchSettings) -> dict[str, Any]:
    """Return a DeepSpeed JSON with ZeRO-1, AdamW and clipping. It has no "auto", so every baseline can read it."""
    params: dict[str, Any] = {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if settings.device.kind == "cuda" and not nvcc_fits_torch():
        params |= {"torch_adam": True, "fused": True}  # DeepSpeed's FusedAdam needs nvcc
    precision = {} if settings.precision == "fp32" else {settings.precision: {"enabled": True}}
    return {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": params},
            "zero_optimization": {"stage": 1}, **precision}


def write_corpus(prefix: Path, vocab_size: int, tokens: int) -> None:
    """Write random tokens with Zipf's law as in text, so that the loss falls within a few steps."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16 if vocab_size < 65500 else np.int32) as writer:
        for _ in range(0, tokens, _DOCUMENT_TOKENS):
            drawn = vocab_size ** generator.random(_DOCUMENT_TOKENS)  # density proportional to 1 / token
            writer.add_document(np.minimum(drawn.astype(np.int64), vocab_size) - 1)
        writer.finalize({"vocab_size": vocab_size, "max_token": vocab_size - 1})


class BaselineError(Exception):
    """One baseline failed. The others continue."""


def baseline_environment(job: BaselineJob, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables of one rank, as a launcher would set them."""
    ranks = str(len(job.cores))
    values = {**package_environment(), "RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_RANK": str(rank),
              "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              # put this environment's ninja first, because DeepSpeed recompiles its operators if ninja changes
              "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
              "DS_ACCELERATOR": job.device_kind, "TOKENIZERS_PARALLELISM": "false"}
    if job.device_kind == "cpu":
        values.update(OMP_NUM_THREADS=str(len(job.cores[rank])), CUDA_VISIBLE_DEVICES="")
        if job.is_project:  # like train.py, which restarts itself with jemalloc
            values.update(jemalloc_environment(values))
    elif first := job.options["first_device"]:
        visible = values.get("CUDA_VISIBLE_DEVICES")
        values["CUDA_VISIBLE_DEVICES"] = visible.split(",")[first] if visible else str(first)
    return values


class BaselineProcesses:
    """The processes of one baseline, one per rank. Every request goes to all of them."""

    def __init__(self, job: BaselineJob, folder: Path, timeout_s: float) -> None:
        self.job, self._timeout_s = job, timeout_s
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection, Path]] = []
        port = free_port()
        for rank in range(len(job.cores)):
            ours, theirs = Pipe()
            log = folder / f"{Path(job.options['ds_config']).stem}.{rank}.log"
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pretrain.bench.worker", str(theirs.fileno())], stdout=output, stderr=output,
                    stdin=subprocess.DEVNULL, env=baseline_environment(job, rank, port), pass_fds=[theirs.fileno()])
            theirs.close()
            self._ranks.append((process, ours, log))
            self._send(ours, (rank, job))

    def _send(self, connection: Connection, message: object) -> None:
        with contextlib.suppress(OSError):  # answer() reports why the process exited
            connection.send(message)

    def ask(self, request: dict[str, Any]) -> None:
        for _, connection, _ in self._ranks:
            self._send(connection, request)

    def answer(self) -> dict[str, Any]:
        """Return rank 0's answer, with the longest time, the summed memory and the answers ("ranks") of all ranks.

        Raises BaselineError if a rank exits, reports an error or does not answer.
        """
        answers, deadline = [], time.monotonic() + self._timeout_s
        for rank, (process, connection, log) in enumerate(self._ranks):
            if not connection.poll(max(deadline - time.monotonic(), 0)):
                raise BaselineError(f"{self.job.name}: no answer within {self._timeout_s:g} s")
            try:
                answers.append(connection.recv())
            except (EOFError, OSError):
                raise BaselineError(f"{self.job.name}: rank {rank} {_exit_reason(process, log)}") from None
            if "error" in answers[-1]:
                raise BaselineError(f"{self.job.name}: {answers[-1]['error']}")
        merged = {**answers[0], "ranks": answers}
        for name, merge in (("seconds", max), ("peak_memory_bytes", sum), ("reserved_bytes", sum),
                            ("resident_bytes", sum)):
            if name in answers[0]:
                merged[name] = merge(answer[name] for answer in answers)
        return merged

    def end(self) -> None:
        """Close the connections, which ends the processes, and kill those that do not exit."""
        ranks, self._ranks = self._ranks, []
        for _, connection, _ in ranks:
            connection.close()
        for process, _, _ in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_S)
            process.kill()
            process.wait()


def _exit_reason(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Return the exit code and the last line of the log of a rank that closed its connection."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    return ": ".join([f"exited with code {process.returncode}", *(line[:300] for line in lines[-1:])])


JobGroup = list[BaselineJob]
"""Jobs that work at the same time and count as one baseline, which has the name of the first job."""


@dataclass
class InterleavedResults:
    """Answers of the baselines, by name. A baseline that failed is in `failures` and not in `answers`."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # values of `RequestLoop.report_build`
    warmups: dict[str, dict[str, Any]] = field(default_factory=dict)  # answer to the warm-up steps
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # one for each repetition
    failures: list[str] = field(default_factory=list)  # one line for each failed baseline

    def seconds(self, name: str) -> list[float]:
        return [answer["seconds"] for answer in self.answers[name]]

    def losses(self, name: str) -> list[float]:
        """Loss of every step, from the first step of the warm-up."""
        return [*self.warmups[name]["losses"], *(loss for answer in self.answers[name] for loss in answer["losses"])]


def run_interleaved(groups: list[JobGroup], context: BenchContext, report: ReportProgress, *,
                    steps: int | None = None, warmup_steps: int | None = None) -> InterleavedResults:
    """Build the baselines one after another, then run the repetitions. Every second repetition is in reverse order.

    On a GPU one untimed step precedes those of a repetition, because the allocator's cache was emptied after the
    previous one.

    Args:
        report: prints a line of progress.
        steps: timed steps of a repetition (default: the preset's).
        warmup_steps: steps before the first repetition (default: the preset's).
    """
    preset, results = context.settings.preset, InterleavedResults()
    warmup_steps = preset.warmup_steps if warmup_steps is None else warmup_steps
    request = {"steps": steps or preset.steps, "untimed_steps": int(context.settings.device.kind == "cuda")}
    for together in [groups] if preset.side_by_side else [[group] for group in groups]:
        _run_together(together, context, report, request, warmup_steps, results)
    return results


def _run_together(groups: list[JobGroup], context: BenchContext, report: ReportProgress, request: dict[str, Any],
                  warmup_steps: int, results: InterleavedResults) -> None:
    """Run baselines whose processes exist at the same time, and add their answers to the results."""
    settings = context.settings
    with contextlib.ExitStack() as stack:
        running: dict[str, list[BaselineProcesses]] = {}
        for group in groups:  # their processes import their modules in parallel
            running[group[0].name] = [BaselineProcesses(job, context.folder, settings.timeout_s) for job in group]
            for processes in running[group[0].name]:
                stack.callback(processes.end)

        @contextlib.contextmanager
        def failures_of(name: str) -> Iterator[None]:
            """Record the failure of a baseline, and continue without it."""
            try:
                yield
            except BaselineError as error:
                results.failures.append(str(error))
                results.answers.pop(name, None)
                for processes in running.pop(name):
                    processes.end()

        for name in list(running):
            report(f"{name}: building")
            with failures_of(name):
                for processes in running[name]:
                    processes.answer()  # {"imported": True}
                results.facts[name] = _ask(running[name], {})
                if warmup_steps:
                    results.warmups[name] = _ask(running[name], {"steps": warmup_steps})
                results.answers[name] = []
        for number in range(settings.repetitions):
            report(f"repetition {number + 1} of {settings.repetitions}")
            for name in list(running) if number % 2 == 0 else list(reversed(running)):
                with failures_of(name):
                    results.answers[name].append(_ask(running[name], request))


def _ask(group: list[BaselineProcesses], request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to a group. Return its first job's answer, with the mean time of all its jobs."""
    for processes in group:
        processes.ask(request)
    answers = [processes.answer() for processes in group]
    if "seconds" in answers[0]:
        answers[0]["seconds"] = statistics.fmean(answer["seconds"] for answer in answers)
    return answers[0]
