"""Run baselines in processes of their own, in interleaved repetitions.

A baseline is anything that is measured: a part of this project, another training program, or a limit of the machine.
The first repetition of every baseline comes first, then the second one, and so on. While one baseline works, the others
sleep, so changes in the speed of the machine affect all baselines alike.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.child import child_command
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import Device, compiles_cuda, cpu_device, cuda_device
from pretrain.distributed.process import free_port, jemalloc_environment
from pretrain.model.config import load_model_config
from tools.benchmarks.settings import BenchSettings

LEARNING_RATE = 1e-4
SAVE_INTERVAL_S = 1800.0  # training time between two saves, for the fractions of --what checkpoint
_EXIT_S = 10  # time for a process to exit after the last request; then it is killed
_DOCUMENT_TOKENS = 5000
ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class BaselineJob:
    """Which baseline runs, with which flags."""

    name: str  # as tables show it
    main: str  # "module.function" in tools/benchmarks/
    flags: tuple[str, ...]  # flags of pretrain/train.py
    device_kind: str  # "cpu" or "cuda"
    ds_config: Path
    folder: Path  # for its files; its log is next to it
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
        return check_run(parse_arguments(list(self.flags)), world_size=1, device=self.device)


class BenchContext:
    """The temporary folder with the inputs that all baselines share: corpus, DeepSpeed JSON, model."""

    def __init__(self, settings: BenchSettings, folder: Path) -> None:
        self.settings, self.folder, preset = settings, folder, settings.preset
        overrides = preset.overrides.format(positions=preset.seq_length)
        self.model = load_model_config(preset.model, overrides or None)
        write_corpus(folder / "corpus", self.model.vocab_size, max(200 * preset.seq_length, 2_000_000))
        self._ds_config = folder / "deepspeed.json"
        self._ds_config.write_text(json.dumps(_ds_config(settings)))
        self._flags = (f"--deepspeed_config={self._ds_config}", f"--model={preset.model}",
                       *([f"--model_overrides={overrides}"] if overrides else []),
                       f"--train_data={folder / 'corpus'}", "--split=1", f"--seq_length={preset.seq_length}",
                       "--train_steps=1000000", "--lr_schedule=constant", "--lr_warmup_steps=0", "--save_interval=0",
                       "--eval_interval=0")

    def job(self, name: str, main: str, **options: Any) -> BaselineJob:
        """Return a job. Flags of the user are added if it runs this project's code."""
        folder = self.folder / f"{name.replace(' ', '_').replace('/', '_')}-run"
        job = BaselineJob(name, main, (*self._flags, f"--save={folder}"), self.settings.device.kind, self._ds_config,
                          folder, options)
        return replace(job, flags=job.flags + self.settings.train_flags) if job.is_project else job


def _ds_config(settings: BenchSettings) -> dict[str, Any]:
    """Return a DeepSpeed JSON with ZeRO-1, AdamW and clipping. It has no "auto", so every baseline can read it."""
    params: dict[str, Any] = {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if settings.device.kind == "cuda" and not compiles_cuda():
        params |= {"torch_adam": True, "fused": True}  # DeepSpeed's FusedAdam needs nvcc
    precision = {} if settings.precision == "fp32" else {settings.precision: {"enabled": True}}
    return {"train_micro_batch_size_per_gpu": settings.preset.micro_batch_size, "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": params},
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


def baseline_environment(job: BaselineJob) -> dict[str, str]:
    """Return the environment variables of the process, as a launcher would set them for a single rank."""
    values = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
              "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              # put this environment's ninja first, because DeepSpeed recompiles its operators if ninja changes
              "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
              "DS_ACCELERATOR": job.device_kind, "TOKENIZERS_PARALLELISM": "false"}
    if job.device_kind == "cpu":
        values.update(OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))), CUDA_VISIBLE_DEVICES="")
        if job.is_project:  # like train.py, which restarts itself with jemalloc
            values.update(jemalloc_environment(values))
    return values


class BaselineProcess:
    """The process of one baseline."""

    def __init__(self, job: BaselineJob, timeout_s: float) -> None:
        self._name, self._timeout_s, self._log = job.name, timeout_s, job.folder.with_suffix(".log")
        self._connection, theirs = Pipe()
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                child_command("tools.benchmarks.worker", str(theirs.fileno())), stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, env=baseline_environment(job), pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection.send(job)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return the answer. Raises BaselineError if the process fails or does not answer."""
        try:
            self._connection.send(request)
            if not self._connection.poll(self._timeout_s):
                raise BaselineError(f"{self._name}: no answer within {self._timeout_s:g} s")
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise BaselineError(f"{self._name}: {self._exit_reason()}") from None
        if "error" in answer:
            raise BaselineError(f"{self._name}: {answer['error']}")
        return answer

    def _exit_reason(self) -> str:
        """Return the exit code of the process, which has closed its connection, and the last line of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [line.strip()[:300] for line in lines if line.strip()][-1:]
        return ": ".join([f"exited with code {self._process.returncode}", *last])

    def close(self) -> None:
        """Close the connection, which ends the process, and kill it if it does not exit."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._process.kill()
        self._process.wait()


@dataclass
class InterleavedResults:
    """Answers of the baselines, by name. A baseline that failed is in `failures` and not in `answers`."""

    parameters: dict[str, int] = field(default_factory=dict)  # number of parameters of the model
    warmups: dict[str, dict[str, Any]] = field(default_factory=dict)  # answer to the warm-up steps
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # one for each repetition
    failures: list[str] = field(default_factory=list)  # one line for each failed baseline

    def losses(self, name: str) -> list[float]:
        """Loss of every step, from the first step of the warm-up."""
        return [loss for answer in (self.warmups[name], *self.answers[name]) for loss in answer["losses"]]


def run_interleaved(jobs: Sequence[BaselineJob], context: BenchContext, report: ReportProgress, *,
                    steps: int | None = None, warmup_steps: int | None = None) -> InterleavedResults:
    """Build the baselines one after another, then run the repetitions. Every second repetition is in reverse order.

    On a GPU one untimed step precedes the steps of a repetition, because the allocator's cache was emptied after the
    previous one.

    Args:
        report: prints a line of progress.
        steps: timed steps of a repetition (default: the preset's).
        warmup_steps: steps before the first repetition (default: the preset's).
    """
    settings, results = context.settings, InterleavedResults()
    warmup_steps = settings.preset.warmup_steps if warmup_steps is None else warmup_steps
    request = {"steps": steps or settings.preset.steps, "untimed_steps": int(settings.device.kind == "cuda")}
    for together in [jobs] if settings.preset.side_by_side else [[job] for job in jobs]:
        with contextlib.ExitStack() as stack:
            # the processes import their modules in parallel
            running = {job.name: stack.enter_context(contextlib.closing(BaselineProcess(job, settings.timeout_s)))
                       for job in together}

            @contextlib.contextmanager
            def baseline(name: str, running: dict[str, BaselineProcess] = running) -> Iterator[BaselineProcess]:
                """Record the failure of a baseline, and continue without it."""
                try:
                    yield running[name]
                except BaselineError as error:
                    results.failures.append(str(error))
                    results.answers.pop(name, None)
                    running.pop(name).close()

            for name in list(running):
                report(f"{name}: building")
                with baseline(name) as process:
                    results.parameters[name] = process.ask({})["parameters"]
                    if warmup_steps:
                        results.warmups[name] = process.ask({"steps": warmup_steps})
                    results.answers[name] = []
            for number in range(settings.repetitions):
                report(f"repetition {number + 1} of {settings.repetitions}")
                for name in list(running) if number % 2 == 0 else list(reversed(running)):
                    with baseline(name) as process:
                        results.answers[name].append(process.ask(request))
    return results
