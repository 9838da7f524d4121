"""Result of a run with faults: whether it recovered from each fault, and ended like its reference."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from pretrain.checkpoint.load.reader import CheckpointReader, chunks_of
from pretrain.errors import FINISHED
from pretrain.monitor.read_run_folder import read_metrics
from tests.chaos.checkpoints import LostCheckpoint
from tests.chaos.faults import KINDS
from tests.chaos.injector import AppliedFault
from tests.chaos.watch import RunWatch, SeenRow

_COMPARED = ("loss", "grad_norm", "lr", "consumed_samples")


@dataclass
class KindResult:
    """Row of the table: the faults of one kind."""

    faults: int = 0
    recovered: int = 0  # faults after which the run trained further steps, or was complete


@dataclass
class ChaosResult:
    """Everything that the report shows, and RUN/chaos.json contains."""

    seed: int
    exit_code: int  # of the last start
    kinds: dict[str, KindResult]
    faults: list[AppliedFault]
    planned: int
    steps: int  # of the reference
    missing_steps: int  # steps of the reference that the run has not logged
    steps_lost: int  # steps that were trained again because no undamaged checkpoint had them
    wrong_steps: int  # logged steps that differ from the reference
    lost: list[LostCheckpoint]
    goodput: float | None  # of the last row of metrics.jsonl
    hashes: tuple[str, str]  # of the final weights and optimizer states: run, reference
    failure: str = ""  # why the run was ended early
    starts: list[dict[str, Any]] = field(default_factory=list)  # rows of restarts.jsonl

    def total(self) -> KindResult:
        """Return the sum over all kinds."""
        return KindResult(sum(row.faults for row in self.kinds.values()),
                          sum(row.recovered for row in self.kinds.values()))

    def problems(self) -> list[str]:
        """Return one line for each reason why the exit code is 1; [] if everything is equal and nothing was lost."""
        total, found = self.total(), []
        if self.failure or self.exit_code != FINISHED:
            found.append(self.failure or f"the run ended with exit code {self.exit_code}")
        if total.faults < self.planned:
            found.append(f"{total.faults} of {self.planned} faults were applied before the run ended")
        if total.recovered < total.faults:
            found.append(f"{total.faults - total.recovered} faults without a recovery")
        if self.missing_steps:
            found.append(f"{self.missing_steps} of {self.steps} steps were not trained")
        if self.wrong_steps:
            found.append(f"{self.wrong_steps} steps differ from the reference")
        if self.hashes[0] != self.hashes[1]:
            found.append("the final weights and optimizer states differ from the reference")
        return found + [f"checkpoint of step {each.step} ({each.bytes:,} bytes) is lost: {each.reason}"
                        for each in self.lost]

    def to_json(self) -> dict[str, Any]:
        """Return all values for RUN/chaos.json."""
        return {"ok": not self.problems(), "problems": self.problems(), "total": asdict(self.total()), **asdict(self)}


def report_table(result: ChaosResult) -> Table:
    """Return the table. Kinds without faults are left out."""
    table = Table("fault", box=None, pad_edge=False, header_style="")
    for title in ("faults", "recovered"):
        table.add_column(title, justify="right")
    for name, row in [*result.kinds.items(), ("all", result.total())]:
        if row != KindResult():
            table.add_row(name, f"{row.faults:,}", f"{row.recovered:,}")
    return table


def report_lines(result: ChaosResult) -> list[str]:
    """Return the lines below the table: restarts, goodput, comparison with the reference, problems."""
    found, expected = result.hashes
    goodput = "unknown" if result.goodput is None else f"{result.goodput:.1%}"
    lines = [f"{len(result.starts) - 1} restarts, {result.steps_lost} steps trained again, goodput {goodput}",
             f"steps: {result.steps - result.missing_steps} of {result.steps} of the reference were trained, "
             f"{result.wrong_steps} logged steps differ",
             f"final weights and optimizer states: SHA-256 {found[:16]}, reference {expected[:16]}"]
    return lines + [f"FAILED  {problem}" for problem in result.problems()]


def count_by_kind(faults: Sequence[AppliedFault], bad_steps: Sequence[int], starts: Sequence[dict[str, Any]],
                  watch: RunWatch, *, complete: bool) -> dict[str, KindResult]:
    """Count the applied faults, and those from which the run has recovered.

    Args:
        bad_steps: steps whose loss had to be NaN. Recovered are those after which a step had a finite loss again.
        starts: rows of restarts.jsonl.
        complete: whether the run has trained all its steps.
    """
    kinds = {name: KindResult() for name in KINDS}
    for fault in faults:
        if fault.applied:
            kinds[fault.kind].faults += 1
            kinds[fault.kind].recovered += _has_recovered(fault, starts, watch, complete=complete)
    losses = {row.values["step"]: row.values["loss"] for row in watch.steps()}
    for step in bad_steps:
        if step in losses and losses[step] is None:
            kinds["nan"].faults += 1
            kinds["nan"].recovered += any(losses.get(later) is not None for later in range(step + 1, step + 3))
    return kinds


def _has_recovered(fault: AppliedFault, starts: Sequence[dict[str, Any]], watch: RunWatch, *, complete: bool) -> bool:
    """Return whether the run trained a step after the fault; after truncated data, only in a later start."""
    if not fault.ended:
        return False
    if fault.kind == "data":  # training on the truncated data would be wrong; starts[0] is start 1
        return starts[fault.start - 1]["exit_code"] != FINISHED and not watch.steps_of_start(fault.start)
    return complete or any(row.time > fault.time for row in watch.steps())


def steps_lost(watch: RunWatch) -> int:
    """Return how many steps were trained again by a later start."""
    trained = lost = 0  # `trained`: last step of the previous start that trained
    for number in range(1, watch.num_starts + 1):
        if rows := watch.steps_of_start(number):
            lost += max(trained - (int(rows[0].values["step"]) - 1), 0)
            trained = int(rows[-1].values["step"])
    return lost


def reference_rows(run: Path) -> dict[int, tuple[object, ...]]:
    """Return step -> compared values of the reference."""
    return {row["step"]: _compared(row) for row in read_metrics(run) if "step_time_ms" in row}


def wrong_rows(rows: list[SeenRow], reference: dict[int, tuple[object, ...]]) -> list[SeenRow]:
    """Return the rows whose values differ from the reference. A step that was trained again has several rows."""
    return [row for row in rows if reference.get(row.values["step"]) != _compared(row.values)]


def _compared(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row.get(name) for name in _COMPARED)


def state_hash(checkpoint: Path) -> str:
    """Return the SHA-256 of all weights and optimizer states of a checkpoint, in the order of their names.

    The files themselves cannot be compared: they also contain times and paths.
    """
    reader, digest = CheckpointReader(checkpoint), hashlib.sha256()
    digest.update(repr(sorted(reader.scalars.items())).encode())
    for name in sorted(reader.shapes):
        for state in reader.states:
            digest.update(f"{name} {state} {reader.shapes[name]}".encode())
            for start, length in chunks_of(prod(reader.shapes[name])):
                digest.update(reader.read(name, state, start, length).contiguous().numpy().tobytes())
    return digest.hexdigest()
