"""Rank r of N ranks in one process: the real engine of the real model, with tensors that have sizes and no memory.

DeepSpeed runs as it is, with torch's fake process group (collectives that do nothing) and under torch's FakeTensorMode;
forward and backward pass, reduction and optimizer step all happen, so that every buffer is allocated as in a real run,
and `inventory` and `tracker` count them as they do there. What is replaced, as it would look at data that is not there:

- a scalar that the host reads: 1 for a float (a loss, a norm), 0 for anything else (no overflow);
- DeepSpeed's compiled operators (Adam and the like on the CPU, asynchronous I/O): they do nothing; files on NVMe are
  noted with their sizes instead of being written;
- what a pipeline stage learns from its neighbours: that one hidden state [B, T, D] in the model's precision comes.

Not simulated: other accelerators than the CPU. Places are those of a GPU run, sizes those of CPU kernels; they differ
in activations only (attention keeps other tensors on CUDA).
"""

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config.arguments import RunArguments
from pretrain.config.validate import resolve_run
from pretrain.distributed.device import cpu_device
from pretrain.distributed.process import package_environment
from pretrain.errors import ConfigError
from pretrain.memory.footprint import Footprint

_STEPS = 2
_BEGINS = "begins: "  # of a line that the process prints before each job


@dataclass(frozen=True)
class Simulation:
    """One simulated rank."""

    held: Footprint  # between backward pass and optimizer step; swap files included
    peak_bytes: int  # of all tensors together, in a step after the first
    notes: tuple[str, ...]


def simulate(args: RunArguments, rank: int, world_size: int) -> Simulation:
    """One rank of a world, in a process of its own.

    Raises:
        ConfigError: as the run itself would be refused, or why this layout cannot be simulated.
    """
    (result,) = simulate_many([(args, rank, world_size)])
    if isinstance(result, ConfigError):
        raise result
    return result


def simulate_many(jobs: Sequence[tuple[RunArguments, int, int]],
                  begins: Callable[[int], None] = lambda index: None) -> list[Simulation | ConfigError]:
    """(flags, rank, world size) each, and the result or the error of each; one process imports everything, and forks
    one for each job. Raises ConfigError where there are no results at all.

    Args:
        begins: called before each job, with its index.
    """
    results: list[Simulation | ConfigError | None] = [_refusal(*job) for job in jobs]
    rest = [index for index, result in enumerate(results) if result is None]
    if rest:
        answers = _run([jobs[index] for index in rest], lambda index: begins(rest[index]))
        for index, answer in zip(rest, answers, strict=True):
            results[index] = answer
    return [result for result in results if result is not None]


def _refusal(args: RunArguments, rank: int, world_size: int) -> ConfigError | None:
    """What can be said at once, without DeepSpeed."""
    if not 0 <= rank < world_size:
        return ConfigError("simulate", found=f"rank {rank} of {world_size}", expected=f"0 to {world_size - 1}")
    try:
        resolve_run(args, world_size=world_size, device=cpu_device())
    except ConfigError as error:
        return error
    return None


def _run(jobs: Sequence[tuple[RunArguments, int, int]],
         begins: Callable[[int], None]) -> list[Simulation | ConfigError]:
    """All jobs in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "jobs.json")
        path.write_text(json.dumps([{"args": asdict(args), "rank": rank, "world_size": size}
                                    for args, rank, size in jobs]))
        environ = {**package_environment(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        errors = Path(folder, "stderr.txt")
        with errors.open("w") as stderr, subprocess.Popen(
                [sys.executable, "-m", "pretrain.memory.simulate.simulate_ranks", str(path)], env=environ, text=True,
                stdout=subprocess.PIPE, stderr=stderr) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_BEGINS):
                    begins(int(line.removeprefix(_BEGINS)))
        answers = Path(folder, "answers.json")
        if not answers.is_file():
            raise ConfigError("simulate", expected="its answers",
                              found=f"a process that ended with {process.returncode}: {_last(errors.read_text())}")
        return [_simulation(answer) for answer in json.loads(answers.read_text())]


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def _simulation(answer: dict[str, Any]) -> Simulation | ConfigError:
    if "refused" in answer:
        return ConfigError.from_line(answer["refused"])
    return Simulation(Footprint.of_json(answer["held"]), answer["peak_bytes"], tuple(answer["notes"]))


def main(path: Path) -> None:
    """The process of `simulate_many`."""
    from pretrain.engine.prepare import prepare_deepspeed

    prepare_deepspeed(cpu_device())
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 (it and the next take seconds in each fork)
    import torch._inductor.compile_fx  # noqa: F401

    from pretrain.memory.simulate import fake_world

    gc.freeze()  # DeepSpeed collects garbage often; what is imported is none
    answers = []
    for index, job in enumerate(json.loads(path.read_text())):
        print(f"{_BEGINS}{index}", flush=True)
        args = RunArguments(**job["args"])
        answers.append(_in_fork(functools.partial(_answer, fake_world, args, job["rank"], job["world_size"])))
    path.with_name("answers.json").write_text(json.dumps(answers))


def _answer(fake_world: Any, args: RunArguments, rank: int, world_size: int) -> dict[str, Any]:
    try:
        return dict(fake_world.observe_rank(args, rank, world_size, steps=_STEPS))
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:  # of DeepSpeed or torch: whatever it is, this layout cannot be simulated
        import traceback

        traceback.print_exc()
        where = f"simulate {Path(args.deepspeed_config).name}"
        line = ConfigError(where, found=f"{type(error).__name__}: {error}"[:300], expected="a layout that DeepSpeed "
                           "runs on tensors without data", remedy="measure it, or take the estimate")
        return {"refused": str(line)}


def _in_fork(action: Any) -> dict[str, Any]:
    """What `action` returns in a fork of this process: it may change whatever it likes there."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(write_end, "w") as answer:
                json.dump(action(), answer)
                answer.flush()
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"refused": f"simulate: found a process that ended with status {status}; "
                                                     "expected an answer."}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
