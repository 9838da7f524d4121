"""Result of a run with faults: whether it recovered from each fault, and ended like its reference."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from pretrain.checkpoint.load.reader import CheckpointReader, chunks_of
from pretrain.errors import FINISHED
from tests.extensions.supervise.chaos.faults import KINDS
from tests.extensions.supervise.chaos.injector import AppliedFault
from tests.extensions.supervise.chaos.watch import RunWatch

_COMPARED = ("step", "loss", "grad_norm", "lr", "consumed_samples")
Kinds = dict[str, dict[str, int]]  # kind -> {"faults": their number, "recovered": how many the run has recovered from}


@dataclass
class ChaosResult:
    """Everything that the report shows, and RUN/chaos.json contains."""

    seed: int
    exit_code: int  # exit code of the last start
    kinds: Kinds
    faults: list[AppliedFault]
    planned: int
    steps: int  # steps of the reference
    missing_steps: int  # steps of the reference that the run has not logged
    wrong_steps: int  # logged steps that differ from the reference
    lost: list[str]  # a line for each lost checkpoint
    hashes: tuple[str, str]  # hashes of the final weights and optimizer states: run, reference
    failure: str = ""  # why the run was ended early
    starts: list[dict[str, Any]] = field(default_factory=list)  # rows of restarts.jsonl

    @property
    def total(self) -> dict[str, int]:
        """The sum over all kinds."""
        return {name: sum(row[name] for row in self.kinds.values()) for name in ("faults", "recovered")}

    def problems(self) -> list[str]:
        """Return one line for each reason why the exit code is 1; [] if everything is equal and nothing was lost."""
        applied, recovered = self.total.values()
        return [problem for problem, is_true in {
            self.failure or f"the run ended with exit code {self.exit_code}":
                self.failure or self.exit_code != FINISHED,
            f"{applied} of {self.planned} faults were applied before the run ended": applied < self.planned,
            f"{applied - recovered} faults without a recovery": recovered < applied,
            f"{self.missing_steps} of {self.steps} steps were not trained": self.missing_steps,
            f"{self.wrong_steps} steps differ from the reference": self.wrong_steps,
            "the final weights and optimizer states differ from the reference": self.hashes[0] != self.hashes[1],
            **dict.fromkeys(self.lost, True)}.items() if is_true]

    def lines(self) -> list[str]:
        """Return the report."""
        found, expected = self.hashes
        return [f"{name}: {row['faults']} faults, {row['recovered']} recovered"
                for name, row in {**self.kinds, "all": self.total}.items() if row["faults"]] + [
            f"{len(self.starts) - 1} restarts; {self.steps - self.missing_steps} of {self.steps} steps of the "
            f"reference were trained, {self.wrong_steps} logged steps differ",
            f"final weights and optimizer states: SHA-256 {found[:16]}, reference {expected[:16]}",
            *(f"FAILED  {problem}" for problem in self.problems())]


def count_by_kind(faults: Sequence[AppliedFault], bad_steps: Sequence[int], starts: Sequence[dict[str, Any]],
                  watch: RunWatch, *, complete: bool) -> Kinds:
    """Count the applied faults, and those from which the run has recovered.

    Args:
        bad_steps: steps whose loss had to be NaN. Recovered are those after which a step had a finite loss again.
        starts: rows of restarts.jsonl.
        complete: whether the run has trained all its steps.
    """
    kinds = {name: {"faults": 0, "recovered": 0} for name in KINDS}

    def count(kind: str, recovered: bool) -> None:
        kinds[kind]["faults"] += 1
        kinds[kind]["recovered"] += recovered

    for fault in faults:
        if fault.applied:
            count(fault.kind, _has_recovered(fault, starts, watch, complete=complete))
    losses = {row["step"]: row["loss"] for row in watch.steps()}
    for step in bad_steps:
        if losses.get(step, "not logged") is None:
            count("nan", any(losses.get(later) is not None for later in range(step + 1, step + 3)))
    return kinds


def _has_recovered(fault: AppliedFault, starts: Sequence[dict[str, Any]], watch: RunWatch, *, complete: bool) -> bool:
    """Return whether the run trained a step after the fault; after truncated data, only in a later start."""
    if fault.kind == "data":  # training on the truncated data would be wrong; starts[0] is start 1
        return starts[fault.start - 1]["exit_code"] != FINISHED and not watch.steps_of_start(fault.start)
    return fault.ended and (complete or len(watch.steps()) > fault.rows)


def compared(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return the values of each step that must equal the reference."""
    return [tuple(row.get(name) for name in _COMPARED) for row in rows]


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
