"""Modes simulate and measure of `ds-pretrain compare`: the memory of real engines, compared with the estimate."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.config.auto_values import DEFAULT_LEARNING_RATE
from pretrain.config.ds_json.read import get_value
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.model_of_run import given_dropouts
from pretrain.distributed.device import cpu_device, detect_device
from pretrain.errors import ConfigError
from pretrain.extensions.planner.measure.measure_run import measure_run
from pretrain.extensions.planner.measure.rank_memory import RankMemory
from pretrain.extensions.planner.measure.simulate_ranks import SimulationRequest, simulate_ranks
from pretrain.memory.compare.candidates import ANY_LENGTH, Candidate
from pretrain.memory.compare.compare import Workload
from pretrain.memory.compare.compare_zero import print_lines, print_table, wide_console
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory, estimate_rank
from pretrain.memory.estimate.rank import Rank
from pretrain.memory.footprint import in_unit

DEFAULT_STEPS = 4


@dataclass(frozen=True)
class EstimateCheck:
    """Estimated and actual memory of one rank of a layout, or the reason why there is no result.

    The rank is the one with the largest estimate on its device (simulate) or the largest measured states (measure).
    """

    candidate: Candidate
    rank: int = 0
    estimate: MemoryEstimate | None = None  # of this rank
    memory: RankMemory | None = None  # the actual memory
    step_time_ms: float | None = None
    notes: tuple[str, ...] = ()
    failure: str = ""

    def states(self) -> tuple[int, int]:
        """Return (estimated, actual) bytes of model states in all locations."""
        assert self.estimate is not None
        assert self.memory is not None
        return self.estimate.steady.states(), self.memory.held.states()

    def peaks(self) -> tuple[int, int]:
        """Return (estimated, actual) bytes of all tensors in memory. Margin and NVMe are left out."""
        assert self.estimate is not None
        assert self.memory is not None
        peak = self.estimate.peak
        return peak.total() - peak.total(location="nvme") - peak.total("margin"), self.memory.peak_bytes


def _simulate(candidates: Sequence[Candidate], workload: Workload, flags: argparse.Namespace) -> list[EstimateCheck]:
    """For each layout, simulate the rank with the largest estimate on its device."""
    assert workload.model is not None
    estimates = [estimate_memory(workload.model, candidate.layout) for candidate in candidates]
    ranks = [estimate.pipeline_stage * _ranks_per_stage(candidate) + estimate.zero_rank
             for candidate, estimate in zip(candidates, estimates, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        requests = [SimulationRequest(_train_arguments(candidate, flags, Path(folder, str(index))), rank,
                                      candidate.layout.world_size, candidate.layout.layer_times)
                    for index, (candidate, rank) in enumerate(zip(candidates, ranks, strict=True))]
        results = simulate_ranks(
            requests, on_start=lambda index: _print_progress(f"simulate: {candidates[index].name}"))
    return [EstimateCheck(candidate, failure=str(result)) if isinstance(result, ConfigError) else
            EstimateCheck(candidate, rank, estimate, result.memory, notes=result.notes)
            for candidate, rank, estimate, result in zip(candidates, ranks, estimates, results, strict=True)]


def _measure(candidate: Candidate, workload: Workload, flags: argparse.Namespace) -> EstimateCheck:
    """Run one layout on this machine. A run that is rejected or fails gives a check with a failure."""
    assert workload.model is not None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = measure_run(_train_arguments(candidate, flags, Path(folder)), candidate.layout.world_size,
                              steps=flags.steps or DEFAULT_STEPS)
        except ConfigError as error:
            return EstimateCheck(candidate, failure=str(error))
    rank, measured = max(enumerate(run.ranks), key=lambda item: (item[1].held.states(), item[1].peak_bytes))
    pipeline_stage, zero_rank = divmod(rank, _ranks_per_stage(candidate))
    layout = replace(candidate.layout, layer_times=run.layer_times)  # of which the stages of this run depend
    estimate = estimate_rank(Rank(workload.model, layout, pipeline_stage, zero_rank))
    return EstimateCheck(candidate, rank, estimate, measured, run.step_time_ms)


def _ranks_per_stage(candidate: Candidate) -> int:
    """Return the number of ranks of a pipeline stage. A stage's ranks have consecutive numbers."""
    return candidate.layout.world_size // candidate.layout.pipeline_stages


def _train_arguments(candidate: Candidate, flags: argparse.Namespace, folder: Path) -> RunArguments:
    """Return the flags of train.py for a layout, and write its DeepSpeed JSON into the folder."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{candidate.name}.json"
    path.write_text(json.dumps(candidate.config))
    layout = candidate.layout
    device = cpu_device() if flags.mode == "simulate" else detect_device()
    blocks = [get_value(candidate.config, f"zero_optimization.offload_{what}") for what in ("optimizer", "param")]
    needs_nvme_path = any(isinstance(block, dict) and block.get("device") == "nvme"
                          and block.get("nvme_path") in (None, "auto") for block in blocks)
    nvme_path = flags.nvme_path or (str(folder) if flags.mode == "simulate" else None)
    return RunArguments(
        deepspeed_config=str(path), model=flags.model, model_overrides=flags.model_overrides, save=str(folder / "run"),
        seq_length=layout.seq_length, document_attention=layout.document_attention, train_steps=ANY_LENGTH,
        nvme_path=nvme_path if needs_nvme_path else None,
        learning_rate=None if "optimizer" in candidate.config else DEFAULT_LEARNING_RATE,
        emulate_fp16=layout.precision == "fp16" and not device.fp16, **given_dropouts(flags))


def check_estimates(candidates: Sequence[Candidate], workload: Workload,
                    flags: argparse.Namespace) -> list[EstimateCheck]:
    """Simulate or measure every layout, one after another. Raises ConfigError if all of them fail."""
    if flags.mode == "simulate":
        checks = _simulate(candidates, workload, flags)
    else:
        checks = []
        for candidate in candidates:
            _print_progress(f"measure: {candidate.name}")
            checks.append(_measure(candidate, workload, flags))
    if all(check.failure for check in checks):
        raise ConfigError(flags.mode, problem=f"every layout failed; the first one: {checks[0].failure}")
    return checks


def print_checks(checks: list[EstimateCheck], unit: str) -> None:
    """Print a table with the estimate, the actual memory and the error in per cent; below it, notes and failures."""
    console, rows = wide_console(), [_cells(check, unit) for check in checks]
    dropped_first = ("rank", "micro x acc.")  # in a narrow terminal
    print_table(rows, ["bright_black" if check.failure else "" for check in checks], console,
                keep=tuple(title for title in rows[0] if title not in dropped_first))
    lines = [f"{check.candidate.name}: {text}" for check in checks for text in (check.failure, *check.notes) if text]
    print_lines(lines, console)


def _cells(check: EstimateCheck, unit: str) -> dict[str, str]:
    """Return the content of each column of one row, by the column's title. Trailing spaces make equal titles unique."""
    layout = check.candidate.layout
    states, peaks = (("", "", ""), ("", "", "")) if check.failure else (
        _comparison_cells(*check.states(), unit), _comparison_cells(*check.peaks(), unit))
    return {
        "layout": check.candidate.name,
        "micro x acc.": f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}",
        "rank": "" if check.failure else str(check.rank),
        f"states {unit}": states[0], "actual": states[1], "error": states[2],
        f"peak {unit}": peaks[0], "actual ": peaks[1], "error ": peaks[2],
        "step": "" if check.step_time_ms is None else f"{check.step_time_ms:,.0f} ms"}


def _comparison_cells(estimated: int, actual: int, unit: str) -> tuple[str, str, str]:
    """Return the cells (estimate, actual bytes, relative error of the estimate)."""
    return in_unit(estimated, unit), in_unit(actual, unit), f"{estimated / actual - 1:+.1%}" if actual else ""


def checks_json(checks: list[EstimateCheck]) -> str:
    """Return the checks as JSON, with the bytes of one rank by role and location."""
    return json.dumps([{
        "name": check.candidate.name, "path": check.candidate.path, "rank": check.rank, "failure": check.failure,
        "notes": check.notes, "held": check.memory.held.to_json() if check.memory else None,
        "peak_bytes": check.memory.peak_bytes if check.memory else 0, "step_time_ms": check.step_time_ms,
        **_estimate_json(check), "deepspeed_config": check.candidate.config,
    } for check in checks], indent=2) + "\n"


def _estimate_json(check: EstimateCheck) -> dict[str, Any]:
    if check.estimate is None:
        return {}
    return {"estimated_steady": check.estimate.steady.to_json(), "estimated_peak": check.estimate.peak.to_json()}


def _print_progress(line: str) -> None:
    """Print a line to stderr; the result goes to stdout."""
    print(line, file=sys.stderr, flush=True)
