"""Control a baseline from the benchmark: start its processes, send requests, read answers, end the processes."""

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

from pretrain.bench.processes.baseline_job import PROJECT_BASELINES, BaselineJob
from pretrain.distributed.allocator import jemalloc_environment
from pretrain.distributed.process import free_port, package_environment

_EXIT_S = 10  # time for a process to exit after the request "end"; then it is killed


class BaselineError(Exception):
    """One baseline failed. The others continue."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


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
        if job.baseline in PROJECT_BASELINES:  # like train.py, which restarts itself with jemalloc
            values.update(jemalloc_environment(values))
    elif job.option("first_device"):
        visible = values.get("CUDA_VISIBLE_DEVICES", "").split(",") if values.get("CUDA_VISIBLE_DEVICES") else None
        first = job.option("first_device")
        values["CUDA_VISIBLE_DEVICES"] = visible[first] if visible else str(first)
    return values


class BaselineProcesses:
    """The processes of one baseline, one per rank. Every request goes to all of them."""

    def __init__(self, job: BaselineJob, folder: Path, timeout_s: float) -> None:
        self.job, self._timeout_s = job, timeout_s
        port, self._logs = free_port(), []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(len(job.cores)):
            log = folder / f"{Path(job.option('ds_config')).stem}.{rank}.log"
            self._logs.append(log)
            with open(log, "wb") as stderr:
                self._processes.append(subprocess.Popen(
                    [sys.executable, "-m", "pretrain.bench.processes.worker", str(rank), job.to_json()],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                    env=baseline_environment(job, rank, port)))

    def send(self, **request: Any) -> None:
        for process in self._processes:
            _send(process, request)

    def receive(self) -> list[dict[str, Any]]:
        """Return each rank's answer. Raises BaselineError if a rank exits, reports an error or does not answer."""
        texts = {process.stdout.fileno(): b"" for process in self._processes if process.stdout is not None}
        order, deadline = list(texts), time.monotonic() + self._timeout_s
        while waiting := [stream for stream, text in texts.items() if not text.endswith(b"\n")]:
            ready, _, _ = select.select(waiting, [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise BaselineError(self.job.name, f"no answer within {self._timeout_s:g} s")
            for stream in ready:
                chunk = os.read(stream, 65536)
                if not chunk:
                    raise BaselineError(self.job.name, self._exit_reason(order.index(stream)))
                texts[stream] += chunk
        answers = [json.loads(texts[stream]) for stream in order]
        for answer in answers:
            if "error" in answer:
                raise BaselineError(self.job.name, answer["error"])
        return answers

    def merged_answer(self) -> dict[str, Any]:
        """Return rank 0's answer, with the longest time and the summed memory of all ranks."""
        answers = self.receive()
        merged = {**answers[0], "ranks": answers}
        if "seconds" in answers[0]:
            merged["seconds"] = max(answer["seconds"] for answer in answers)
        for name in ("peak_memory_bytes", "reserved_bytes", "resident_bytes"):
            if name in answers[0]:
                merged[name] = sum(answer[name] for answer in answers)
        return merged

    def _exit_reason(self, rank: int) -> str:
        """Return the exit code and the last line of the log of a rank that closed its standard output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(5)
        log = self._logs[rank].read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in log.split("\n") if line.strip()]
        reason = f"rank {rank} exited with code {self._processes[rank].returncode}"
        return f"{reason}: {lines[-1][:300]}" if lines else reason

    def end(self) -> None:
        """Send the request "end", and kill processes that do not exit. A second call does nothing."""
        processes, self._processes = self._processes, []
        for process in processes:
            _send(process, {"do": "end"})
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_S)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]


def _send(process: "subprocess.Popen[bytes]", request: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # receive() reports why the process exited
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()


@contextlib.contextmanager
def started(jobs: list[BaselineJob], folder: Path, timeout_s: float) -> Iterator[list[BaselineProcesses]]:
    """Start the processes of all baselines, which import their modules in parallel. End them after the block."""
    baselines: list[BaselineProcesses] = []
    try:
        for job in jobs:
            baselines.append(BaselineProcesses(job, folder, timeout_s))
        yield baselines
    finally:
        for baseline in baselines:
            baseline.end()
