"""Measure the memory of every rank in a short run of a DeepSpeed JSON on this machine.

Each rank is a process of its own, `python -m pretrain.memory.measure.measure_rank REQUEST.json`. It is started without
a launcher, so that its exit code and its output are known (run_ranks.py). Engine, model and step are those of training.
The tokens are random: memory does not depend on them.
"""

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.validate import resolve_run
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import kernel_oom_kills
from pretrain.memory.footprint import Footprint
from pretrain.memory.measure.run_ranks import FailedRank, failure_error, run_ranks

_TRACKED_STEPS = 2
_PORT_ATTEMPTS = 3


@dataclass(frozen=True)
class RankMeasurement:
    """Memory of one rank."""

    held: Footprint  # between backward pass and optimizer step; swap files included, with their sizes on disk
    unaccounted_bytes: int  # of tensors alive at that point that the inventory did not find; -1 on CUDA: not known
    peak_bytes: int  # of all tensors together in a step after the first; on CUDA max_memory_allocated
    rss_bytes: int  # resident memory of the process

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "RankMeasurement":
        """Read one rank's result of `measure_rank.measure_engine`."""
        held = Footprint.of_json(values["held"]) + Footprint.of_json(values["nvme"])
        return cls(held, values["unaccounted_bytes"], values["peak_bytes"], values["rss_bytes"])


@dataclass(frozen=True)
class RunMeasurement:
    """Memory of every rank of a run, and its step time."""

    name: str
    ranks: tuple[RankMeasurement, ...]
    step_time_ms: float  # median over the steps of the slowest rank's time
    layer_times: tuple[int, ...]  # that the engine measured: see Layout

    @classmethod
    def of_results(cls, name: str, results: list[dict[str, Any]]) -> "RunMeasurement":
        """Combine the ranks' results, as `measure_rank.measure_engine` returns them."""
        steps = zip(*(result["step_times_ms"] for result in results), strict=True)
        slowest = [max(times) for times in steps]
        return cls(name, tuple(RankMeasurement.of_json(result) for result in results),
                   statistics.median(slowest) if slowest else 0.0, tuple(results[0]["layer_times"]))


def measure_run(args: RunArguments, world_size: int, *, steps: int = 4, timeout_s: float = 1800) -> RunMeasurement:
    """Start a run of `world_size` ranks on this machine, and wait for its end.

    Args:
        args: flags of `train.py`; data and run folder are not used.
        steps: number of timed steps, after two steps whose memory is tracked.

    Raises:
        ConfigError: `train.py` would reject the run, or a rank failed.
    """
    name = Path(args.deepspeed_config).stem
    resolve_run(args, world_size=world_size, device=detect_device())
    request = {"args": asdict(args), "tracked_steps": _TRACKED_STEPS, "timed_steps": steps}
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "request.json").write_text(json.dumps(request))
            kills_before = kernel_oom_kills()
            failed = run_ranks(Path(folder), world_size, timeout_s)
            if not failed:
                return RunMeasurement.of_results(name, json.loads(Path(folder, "request.result.json").read_text()))
            culprit = min(failed, key=FailedRank.severity)
            if culprit.port_was_taken and attempt < _PORT_ATTEMPTS:
                continue
            kills_after = kernel_oom_kills()
            oom_kills = None if kills_before is None or kills_after is None else kills_after - kills_before
            raise failure_error(name, culprit, oom_kills)
    raise AssertionError("unreachable")
