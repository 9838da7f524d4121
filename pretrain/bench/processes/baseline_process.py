"""The parent's side: a contender's processes, started, asked and ended."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.bench.processes.baseline_job import OURS, Job
from pretrain.distributed.allocator import jemalloc_environment
from pretrain.distributed.process import free_port, package_environment

_END_S = 10  # for a process to end by itself


class ContenderError(Exception):
    """One contender cannot go on; the others can."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


def environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """What a launcher would set."""
    ranks = str(len(job.cores))
    values = {**package_environment(), "RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_RANK": str(rank),
              "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              # this environment's ninja first: another one would compile DeepSpeed's operators anew
              "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
              "DS_ACCELERATOR": job.device_kind, "TOKENIZERS_PARALLELISM": "false"}
    if job.device_kind == "cpu":
        values.update(OMP_NUM_THREADS=str(len(job.cores[rank])), CUDA_VISIBLE_DEVICES="")
        if job.contender in OURS:  # as train.py does
            values.update(jemalloc_environment(values))
    elif job.option("first_device"):
        visible = values.get("CUDA_VISIBLE_DEVICES", "").split(",") if values.get("CUDA_VISIBLE_DEVICES") else None
        first = job.option("first_device")
        values["CUDA_VISIBLE_DEVICES"] = visible[first] if visible else str(first)
    return values


class Child:
    """One contender: a process for each of its ranks, all of which get every request."""

    def __init__(self, job: Job, folder: Path, timeout_s: float) -> None:
        self.job, self._timeout_s = job, timeout_s
        port, self._logs = free_port(), []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(len(job.cores)):
            log = folder / f"{Path(job.option('ds_config')).stem}.{rank}.log"
            self._logs.append(log)
            with open(log, "wb") as stderr:
                self._processes.append(subprocess.Popen(
                    [sys.executable, "-m", "pretrain.bench.processes.worker", str(rank), job.to_json()],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=folder,
                    env=environment(job, rank, port)))

    def send(self, **request: Any) -> None:
        for process in self._processes:
            _send(process, request)

    def receive(self) -> list[dict[str, Any]]:
        """Each rank's answer. Raises ContenderError: it ended, told an error, or took too long."""
        texts = {process.stdout.fileno(): b"" for process in self._processes if process.stdout is not None}
        order, deadline = list(texts), time.monotonic() + self._timeout_s
        while waiting := [stream for stream, text in texts.items() if not text.endswith(b"\n")]:
            ready, _, _ = select.select(waiting, [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise ContenderError(self.job.name, f"no answer in {self._timeout_s:g} s")
            for stream in ready:
                chunk = os.read(stream, 65536)
                if not chunk:
                    raise ContenderError(self.job.name, self._last_words(order.index(stream)))
                texts[stream] += chunk
        answers = [json.loads(texts[stream]) for stream in order]
        for answer in answers:
            if "error" in answer:
                raise ContenderError(self.job.name, answer["error"])
        return answers

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send and receive: rank 0's answer, with the greatest time and the summed memory of all ranks."""
        self.send(**request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What `ask` returns, of a request that was sent."""
        answers = self.receive()
        together = {**answers[0], "ranks": answers}
        if "seconds" in answers[0]:
            together["seconds"] = max(answer["seconds"] for answer in answers)
        for name in ("peak_memory_bytes", "reserved_bytes", "resident_bytes"):
            if name in answers[0]:
                together[name] = sum(answer[name] for answer in answers)
        return together

    def _last_words(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(5)
        lines = self._logs[rank].read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"rank {rank} ended with {self._processes[rank].returncode}" + (f": {said[-1][:300]}" if said else "")

    def end(self) -> None:
        """Let it end; kill what does not. May be called again."""
        processes, self._processes = self._processes, []
        for process in processes:
            _send(process, {"do": "end"})
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]


def _send(process: "subprocess.Popen[bytes]", request: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # receive() tells why
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()


@contextlib.contextmanager
def children(jobs: list[Job], folder: Path, timeout_s: float) -> Iterator[list[Child]]:
    """All of them, importing at once; ended whatever happens."""
    started: list[Child] = []
    try:
        for job in jobs:
            started.append(Child(job, folder, timeout_s))
        yield started
    finally:
        for child in started:
            child.end()
