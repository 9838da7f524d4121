"""Real runs of DeepSpeed JSONs on this machine, a few steps each, and what every rank held and needed.

    deepspeed --num_accelerators N --module pretrain.memory.measure_rank JOB.json

The engine, the model and the step are those of training; tokens are random, as memory does not depend on them.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.arguments import RunArguments
from pretrain.check import check_settings
from pretrain.device import detect_device
from pretrain.errors import ConfigError
from pretrain.memory.footprint import Footprint
from pretrain.process import ROOT, free_port, package_environment

_TRACKED_STEPS = 2


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
        ConfigError: refused, as `train.py` would refuse it, or ended otherwise than well.
    """
    name = Path(args.deepspeed_config).stem
    check_settings(args, world_size=world_size, device=detect_device())
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"args": asdict(args), "tracked_steps": _TRACKED_STEPS, "timed_steps": steps}))
        command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(world_size),
                   "--master_port", str(free_port()), "--module", "pretrain.memory.measure_rank", str(job)]
        code, output = _run(command, package_environment(), timeout_s)
        result = job.with_suffix(".result.json")
        if code != 0 or not result.is_file():
            raise _failure(name, code, output, sorted(Path(folder).glob("job.error.*")))
        return measurement(name, json.loads(result.read_text()))


def _run(command: list[str], environ: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """(exit code, output); the whole process group is ended when the time is over (code 124)."""
    with subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          start_new_session=True, cwd=ROOT) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return process.returncode, output
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return 124, process.communicate()[0]
            raise


def _failure(name: str, code: int, output: str, errors: list[Path]) -> ConfigError:
    """The reason that a rank gave, or the last line of the output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [path.read_text().strip() for path in errors]
    if reasons and ": found " in reasons[0]:
        return ConfigError.of_line(reasons[0])
    if code == 124:
        return ConfigError(f"measure {name}", found="a run that did not end in time", expected="a few steps")
    killed = next((line for line in lines if "-9" in line and "exit" in line.lower()), "")
    reason = reasons[0] if reasons else killed or (lines[-1] if lines else f"exit code {code}")
    return ConfigError(f"measure {name}", found=f"a run that failed: {reason[:300]}", expected="a few steps",
                       remedy="with fewer layers or a smaller micro-batch it may fit" if "memory" in reason else "")
