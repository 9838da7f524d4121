"""Real runs of DeepSpeed JSONs on this machine, a few steps each, and what every rank held and needed.

Each rank is a process of its own, `python -m pretrain.memory.measure.measure_rank JOB.json`, started without a
launcher, so that its exit code and its output are known (run_ranks.py). The engine, the model and the step are those of
training; tokens are random, as memory does not depend on them.
"""

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config.arguments import RunArguments
from pretrain.config.validate import resolve_run
from pretrain.distributed.device import detect_device
from pretrain.memory.footprint import Footprint
from pretrain.memory.measure.out_of_memory import kernel_oom_kills
from pretrain.memory.measure.run_ranks import FailedRank, failure, run_ranks

_TRACKED_STEPS = 2
_PORTS = 3  # to try, one after another


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank held and needed. -1 and 0: not known on this device."""

    held: Footprint  # between backward pass and optimizer step; swap files included, as the disk has them
    unaccounted_bytes: int  # of tensors alive then that were not found in the engine
    peak_bytes: int  # of all tensors together in a step after the first; on CUDA max_memory_allocated
    reserved_bytes: int  # CUDA: max_memory_reserved
    rss_bytes: int  # resident memory of the process
    peak_rss_bytes: int

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "RankMeasurement":
        """From what measure_rank wrote."""
        held = Footprint.of_json(values["held"]) + Footprint.of_json(values["nvme"])
        return cls(held, values["unaccounted_bytes"], values["peak_bytes"], values["reserved_bytes"],
                   values["rss_bytes"], values["peak_rss_bytes"])

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "held": self.held.to_json()}


@dataclass(frozen=True)
class Measurement:
    """One run."""

    name: str
    ranks: tuple[RankMeasurement, ...]
    step_time_ms: float  # median over steps of the slowest rank's time

    @property
    def worst(self) -> RankMeasurement:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"name": self.name, "step_time_ms": self.step_time_ms, "ranks": [rank.to_json() for rank in self.ranks]}


def measurement(name: str, results: list[dict[str, Any]]) -> Measurement:
    """Of what `measure_rank.measure_here` returned."""
    steps = zip(*(result["step_times_ms"] for result in results), strict=True)
    slowest = [max(times) for times in steps]
    return Measurement(name, tuple(RankMeasurement.of_json(result) for result in results),
                       statistics.median(slowest) if slowest else 0.0)


def measure(args: RunArguments, world_size: int, *, steps: int = 4, timeout_s: float = 1800) -> Measurement:
    """Start a run of `world_size` ranks on this machine, and wait for it.

    Args:
        args: of `train.py`; data and run folder are not used.
        steps: those that are timed, beside two whose memory is tracked.

    Raises:
        ConfigError: rejected, as `train.py` would reject it, or a rank failed.
    """
    name = Path(args.deepspeed_config).stem
    resolve_run(args, world_size=world_size, device=detect_device())
    job = {"args": asdict(args), "tracked_steps": _TRACKED_STEPS, "timed_steps": steps}
    for attempt in range(1, _PORTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "job.json").write_text(json.dumps(job))
            kills = kernel_oom_kills()
            failed = run_ranks(Path(folder), world_size, timeout_s)
            if not failed:
                return measurement(name, json.loads(Path(folder, "job.result.json").read_text()))
            culprit = min(failed, key=FailedRank.severity)
            if culprit.port_was_taken and attempt < _PORTS:
                continue
            kills_now = kernel_oom_kills()
            raise failure(name, culprit, None if kills is None or kills_now is None else kills_now - kills)
    raise AssertionError("unreachable")
