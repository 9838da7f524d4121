"""`simulate` and `measure`: what engines hold, beside what the estimate says that they do."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.config.arguments import RunArguments
from pretrain.config.auto import DEFAULT_LEARNING_RATE
from pretrain.config.ds_json.read import get_value
from pretrain.distributed.device import cpu_device, detect_device
from pretrain.errors import ConfigError
from pretrain.memory.estimate.rank import Rank
from pretrain.memory.estimate.rank_memory import MemoryEstimate, estimate_memory, estimate_rank
from pretrain.memory.footprint import Footprint
from pretrain.memory.measure.measure_run import measure
from pretrain.memory.report.table import print_lines, shown_columns, wide_console
from pretrain.memory.search.candidates import Candidate
from pretrain.memory.search.compare import Workload
from pretrain.memory.simulate.simulate_ranks import simulate_many
from pretrain.memory.sizes import in_unit

DEFAULT_STEPS = 4


@dataclass(frozen=True)
class Observed:
    """One layout and the rank of it that holds the most, or why there is nothing to see."""

    candidate: Candidate
    rank: int = 0
    estimate: MemoryEstimate | None = None  # of that rank
    held: Footprint | None = None  # between backward pass and optimizer step
    peak_bytes: int = 0  # of all its tensors together, at once
    step_time_ms: float | None = None
    notes: tuple[str, ...] = ()
    failure: str = ""

    def states(self) -> tuple[int, int]:
        """(estimated, found) bytes of model states, wherever they lie."""
        return (self.estimate.steady.states() if self.estimate else 0), (self.held.states() if self.held else 0)

    def peaks(self) -> tuple[int, int]:
        """(estimated, found) bytes of all tensors; the estimate's margin and what lies on NVMe are no tensors."""
        if self.estimate is None:
            return 0, self.peak_bytes
        peak = self.estimate.peak
        return peak.total() - peak.total(location="nvme") - peak.total("margin"), self.peak_bytes


def _simulated(candidates: Sequence[Candidate], workload: Workload, flags: argparse.Namespace,
               say: Callable[[str], None]) -> list[Observed]:
    """Of each layout the rank that needs the most, all of them forks of one process."""
    assert workload.shape is not None
    worsts = [estimate_memory(workload.shape, candidate.layout) for candidate in candidates]
    ranks = [worst.pipeline_stage * _stage_ranks(one) + worst.zero_rank
             for one, worst in zip(candidates, worsts, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(_arguments(candidate, flags, Path(folder, str(index))), rank, candidate.layout.world_size)
                for index, (candidate, rank) in enumerate(zip(candidates, ranks, strict=True))]
        answers = simulate_many(jobs, begins=lambda index: say(f"simulate: {candidates[index].name}"))
    return [Observed(candidate, failure=str(answer)) if isinstance(answer, ConfigError) else
            Observed(candidate, rank, worst, answer.held, answer.peak_bytes, notes=answer.notes)
            for candidate, rank, worst, answer in zip(candidates, ranks, worsts, answers, strict=True)]


def _measured(candidate: Candidate, workload: Workload, flags: argparse.Namespace) -> Observed:
    """One layout, run on this machine. What is refused or fails is said in the row."""
    assert workload.shape is not None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = measure(_arguments(candidate, flags, Path(folder)), candidate.layout.world_size,
                          steps=flags.steps or DEFAULT_STEPS)
        except ConfigError as error:
            return Observed(candidate, failure=str(error))
    rank, held = max(enumerate(run.ranks), key=lambda item: (item[1].held.states(), item[1].peak_bytes))
    stage, zero_rank = divmod(rank, _stage_ranks(candidate))
    same = estimate_rank(Rank(workload.shape, candidate.layout, stage, zero_rank))
    return Observed(candidate, rank, same, held.held, held.peak_bytes, run.step_time_ms)


def _stage_ranks(candidate: Candidate) -> int:
    """Ranks of one pipeline stage, which follow one another."""
    return candidate.layout.world_size // candidate.layout.pipeline_stages


def _arguments(candidate: Candidate, flags: argparse.Namespace, folder: Path) -> RunArguments:
    """Those of train.py, as far as they matter without data."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{candidate.name}.json"
    path.write_text(json.dumps(candidate.config))
    layout = candidate.layout
    device = cpu_device() if flags.mode == "simulate" else detect_device()
    blocks = [get_value(candidate.config, f"zero_optimization.offload_{what}") for what in ("optimizer", "param")]
    open_path = any(isinstance(block, dict) and block.get("device") == "nvme"
                    and block.get("nvme_path") in (None, "auto") for block in blocks)
    place = flags.nvme_path or (str(folder) if flags.mode == "simulate" else None)
    return RunArguments(
        deepspeed_config=str(path), model=flags.model, model_overrides=flags.model_overrides, save=str(folder / "run"),
        seq_length=layout.seq_length, train_steps=100, nvme_path=place if open_path else None,
        learning_rate=None if "optimizer" in candidate.config else DEFAULT_LEARNING_RATE,
        emulate_fp16=layout.precision == "fp16" and not device.fp16)


def observe_all(candidates: Sequence[Candidate], workload: Workload, flags: argparse.Namespace,
                say: Callable[[str], None]) -> list[Observed]:
    """One after another; `say` gets a line before each. Raises ConfigError where none succeeds."""
    found = [] if flags.mode == "measure" else _simulated(candidates, workload, flags, say)
    for candidate in candidates if flags.mode == "measure" else ():
        say(f"measure: {candidate.name}")
        found.append(_measured(candidate, workload, flags))
    if all(one.failure for one in found):
        raise ConfigError(flags.mode, found=f"no layout that ran: {found[0].failure}", expected="at least one")
    return found


def print_observed(found: list[Observed], unit: str, console: Console | None = None) -> None:
    """The table: estimate, what was found, and the difference in per cent; notes and failures below it."""
    console = console or wide_console()
    rows = [_cells(one, unit) for one in found]
    left_out = ("rank", "micro x acc.")  # in a narrow terminal, the first of them first
    titles = shown_columns(rows, console.width, keep=tuple(title for title in rows[0] if title not in left_out))
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for title in titles:
        table.add_column(title, justify="left" if title == "layout" else "right", no_wrap=True)
    for one, row in zip(found, rows, strict=True):
        table.add_row(*(row[title] for title in titles), style="bright_black" if one.failure else "")
    console.print(table)
    said = [f"{one.candidate.name}: {text}" for one in found for text in (one.failure, *one.notes) if text]
    print_lines(said, console)


def _cells(one: Observed, unit: str) -> dict[str, str]:
    """One line of the table: the content of each column by its title, of which no two are the same."""
    layout = one.candidate.layout
    states, peaks = (("", "", ""), ("", "", "")) if one.failure else (_pair(*one.states(), unit),
                                                                      _pair(*one.peaks(), unit))
    batch = f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
    return {
        "layout": one.candidate.name, "micro x acc.": batch,
        "rank": "" if one.failure else str(one.rank), f"states {unit}": states[0], "found": states[1], "off": states[2],
        f"peak {unit}": peaks[0], "found ": peaks[1], "off ": peaks[2],
        "step": "" if one.step_time_ms is None else f"{one.step_time_ms:,.0f} ms"}


def _pair(estimated: int, found: int, unit: str) -> tuple[str, str, str]:
    return in_unit(estimated, unit), in_unit(found, unit), f"{estimated / found - 1:+.1%}" if found else ""


def observed_json(found: list[Observed]) -> str:
    """Bytes of one rank, by role and place."""
    return json.dumps([{
        "name": one.candidate.name, "path": one.candidate.path, "rank": one.rank, "failure": one.failure,
        "notes": one.notes, "held": one.held.to_json() if one.held else None, "peak_bytes": one.peak_bytes,
        "step_time_ms": one.step_time_ms, **_estimated(one), "deepspeed_config": one.candidate.config,
    } for one in found], indent=2) + "\n"


def _estimated(one: Observed) -> dict[str, Any]:
    if one.estimate is None:
        return {}
    return {"estimated_steady": one.estimate.steady.to_json(), "estimated_peak": one.estimate.peak.to_json()}


def say_to_stderr(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)
