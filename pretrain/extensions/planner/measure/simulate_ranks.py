"""Simulate single ranks of large runs: the real engine and model, on tensors that have sizes but no memory.

DeepSpeed runs with torch's fake process group (collectives that do nothing) and torch's FakeTensorMode. Forward pass,
backward pass, reduction and optimizer step all happen, so every buffer is allocated as in a real run. As in a
measurement, `tensor_inventory` and `observe_steps` count the tensors. Only two kinds of code are replaced
(fake_world.py): loops over all ranks, and code that needs data:

- A scalar that the host reads is 1 if it is a float (a loss, a norm), and 0 otherwise (no overflow).
- DeepSpeed's compiled operators (Adam on the CPU, asynchronous I/O) do nothing. Files on NVMe are not written; their
  sizes are recorded.
- Implementations of operators by extensions allocate memory and compute nothing (model/operators.py, simulate).
- A pipeline stage does not receive the shape of its input from the stage before it. It always gets one hidden state
  [B, T, D] in the model's precision.

The simulated accelerator is always the CPU. Locations are as in a GPU run, but sizes as with CPU kernels. Only
the activations differ from a GPU run: on CUDA, attention saves other tensors.
"""

import concurrent.futures
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.child import child_command
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.validate import check_settings
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.extensions.planner.measure.rank_memory import RankMemory

_PROGRESS_PREFIX = "simulating request "  # the process prints this and the index before each request


@dataclass(frozen=True)
class SimulationRequest:
    """The rank to simulate, and the run that it belongs to."""

    args: RunArguments
    rank: int
    world_size: int
    layer_times: tuple[int, ...] = ()  # of the layout: see Layout


@dataclass(frozen=True)
class SimulatedRank:
    """Memory of one simulated rank, and the notes of its plan."""

    memory: RankMemory
    notes: tuple[str, ...]


def simulate_ranks(requests: Sequence[SimulationRequest],
                   on_start: Callable[[int], None] = lambda index: None) -> list[SimulatedRank | ConfigError]:
    """Simulate every request. Return the results in the same order, with a ConfigError for each request that failed.

    A request fails if train.py would reject its run, or if its layout cannot be simulated. One new process imports
    torch and DeepSpeed, and forks a process for each request. Raises ConfigError if the new process crashes.

    Args:
        on_start: called before each request, with its index.
    """
    results: dict[int, SimulatedRank | ConfigError] = {}
    for index, request in enumerate(requests):
        error = _rejection(request)
        if error is not None:
            results[index] = error
    accepted = [index for index in range(len(requests)) if index not in results]
    if accepted:
        answers = _run([requests[index] for index in accepted], lambda number: on_start(accepted[number]))
        results.update(zip(accepted, answers, strict=True))
    return [results[index] for index in range(len(requests))]


def _rejection(request: SimulationRequest) -> ConfigError | None:
    """Validate a request before DeepSpeed is imported. Return the error, or None if the request is valid."""
    if not 0 <= request.rank < request.world_size:
        return ConfigError("simulate", found=f"rank {request.rank} of {request.world_size}",
                           expected=f"0 to {request.world_size - 1}")
    try:
        check_settings(request.args, world_size=request.world_size, device=cpu_device())
    except ConfigError as error:
        return error
    return None


def _run(requests: Sequence[SimulationRequest],
         on_start: Callable[[int], None]) -> list[SimulatedRank | ConfigError]:
    """Run `main` of this module with all requests in a new process. Return its answers."""
    with tempfile.TemporaryDirectory() as folder:
        path, log, answers = (Path(folder, name) for name in ("requests", "stderr", "answers"))
        path.write_bytes(pickle.dumps(requests))
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = child_command("pretrain.extensions.planner.measure.simulate_ranks", str(path), str(answers))
        with log.open("w") as stderr, subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE,
                                                       stderr=stderr) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_PROGRESS_PREFIX):
                    on_start(int(line.removeprefix(_PROGRESS_PREFIX)))
        if not answers.is_file():
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            raise ConfigError("simulate", problem=f"the simulating process exited with code {process.returncode} and "
                              f"without a result; its last line: {lines[-1] if lines else '(no output)'}")
        return list(pickle.loads(answers.read_bytes()))


def main(requests: Path, answers: Path) -> None:
    """Simulate every request of a file, each in a fork of this process. Write the answers into a file."""
    from pretrain.engine.prepare import prepare_deepspeed

    prepare_deepspeed(cpu_device())
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 (this and the next import take seconds in each fork)
    import torch._inductor.compile_fx  # noqa: F401

    from pretrain.extensions.planner.measure.fake_world import simulate_rank

    gc.freeze()  # DeepSpeed calls gc.collect often; the collections then skip the imported modules
    found = []
    for index, request in enumerate(pickle.loads(requests.read_bytes())):
        print(f"{_PROGRESS_PREFIX}{index}", flush=True)
        found.append(_in_fork(simulate_rank, request))
    answers.write_bytes(pickle.dumps(found))


def _in_fork(simulate: Callable[[SimulationRequest], Any], request: SimulationRequest) -> Any:
    """Simulate a request in a fork, where functions of torch and DeepSpeed are replaced. Return its result or error."""
    fork = multiprocessing.get_context("fork")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
            return pool.submit(simulate, request).result()
    except ConfigError as error:
        return error
    except Exception as error:  # from DeepSpeed or torch, or BrokenProcessPool
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"[:300]
        return ConfigError(f"simulate {Path(request.args.deepspeed_config).name}", problem="DeepSpeed cannot run this "
                           f"layout on tensors without data ({reason})",
                           remedy="Use the mode measure, or the estimate")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
