"""Results of a chaos run: what each kind of fault cost, and whether the run ended like its reference."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pretrain.chaos.checkpoints import LostCheckpoint
from pretrain.chaos.injector import AppliedFault
from pretrain.chaos.kinds import CHECKPOINT_DAMAGE, KINDS
from pretrain.chaos.watch import RunWatch, SeenRow
from pretrain.errors import FINISHED

NO_FAULT = "(no fault)"


@dataclass
class KindResult:
    """Row of the table: the consequences of all faults of one kind."""

    faults: int = 0
    recovered: int = 0  # faults after which the run trained further steps, or was complete
    restarts: int = 0
    steps_lost: int = 0  # steps that were trained again because no undamaged checkpoint had them
    bytes_lost: int = 0  # of committed checkpoints that disappeared, though no fault damaged them
    wrong_results: int = 0  # logged steps that differ from the reference


@dataclass(frozen=True)
class Goodput:
    """Division of the wall time, in seconds."""

    wall_s: float
    relaunch_s: float  # from the fault that ended a start to the first step of the next one, and the first launch
    kept_s: float  # steps that the final weights include, without the time in which this tool had stopped a rank

    @property
    def fraction(self) -> float:
        """Time of the kept steps, as a fraction of the wall time without the relaunches."""
        return self.kept_s / max(self.wall_s - self.relaunch_s, 1e-9)


@dataclass
class ChaosResult:
    """Everything that the report shows."""

    seed: int
    exit_code: int  # of the last start
    kinds: dict[str, KindResult]
    faults: list[AppliedFault]
    planned: int
    goodput: Goodput
    steps: int  # of the reference
    missing_steps: int  # steps of the reference that the run has not logged
    lost: list[LostCheckpoint]
    hashes: tuple[str, str]  # of the final weights and optimizer states: run, reference
    failure: str = ""  # why the run was ended early
    starts: list[dict[str, Any]] = field(default_factory=list)  # rows of restarts.jsonl

    def total(self) -> KindResult:
        """Return the sum over all kinds."""
        rows = [asdict(row) for row in self.kinds.values()]
        return KindResult(**{name: sum(row[name] for row in rows) for name in asdict(KindResult())})

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
        if total.wrong_results:
            found.append(f"{total.wrong_results} steps differ from the reference")
        if self.hashes[0] != self.hashes[1]:
            found.append("the final weights and optimizer states differ from the reference")
        return found + [f"checkpoint of step {each.step} ({each.bytes:,} bytes) is lost: {each.reason}"
                        for each in self.lost]

    def to_json(self) -> dict[str, Any]:
        """Return all values for RUN/chaos.json."""
        return {"ok": not self.problems(), "problems": self.problems(), "goodput": self.goodput.fraction,
                "total": asdict(self.total()), **asdict(self)}


def count_by_kind(faults: Sequence[AppliedFault], starts: Sequence[dict[str, Any]], watch: RunWatch,
                  wrong: Sequence[SeenRow], lost: Sequence[tuple[float, LostCheckpoint]], *,
                  complete: bool) -> dict[str, KindResult]:
    """Attribute recoveries, restarts, lost steps, lost bytes and wrong steps to the kinds of faults.

    Args:
        starts: rows of restarts.jsonl.
        wrong: rows that differ from the reference.
        lost: lost checkpoints, each with the time at which it was last seen.
        complete: whether the run has trained all its steps.
    """
    kinds = {kind.name: KindResult() for kind in KINDS.values()} | {NO_FAULT: KindResult()}
    applied = [fault for fault in faults if fault.applied]
    for fault in applied:
        kinds[fault.kind].faults += 1
        kinds[fault.kind].recovered += _has_recovered(fault, starts, watch, complete=complete)
    for number in range(1, len(starts)):
        kinds[_cause(applied, number, starts)].restarts += 1
    _count_lost_steps(kinds, applied, starts, watch)
    for row in wrong:
        kinds[_last_before(applied, row.time)].wrong_results += 1
    for last_seen, checkpoint in lost:
        kinds[_last_before(applied, last_seen + 1)].bytes_lost += checkpoint.bytes
    return kinds


def _has_recovered(fault: AppliedFault, starts: Sequence[dict[str, Any]], watch: RunWatch, *, complete: bool) -> bool:
    """Return whether the run trained a step after the fault, in a later start if the fault ends or precedes one."""
    if not fault.ended:
        return False
    if fault.kind == "data":  # training on the truncated data would be wrong; starts[0] is start 1
        return starts[fault.start - 1]["exit_code"] != 0 and not watch.steps_of_start(fault.start)
    if complete:
        return True
    return any(row.time > fault.time for row in watch.steps())


def _cause(applied: Sequence[AppliedFault], number: int, starts: Sequence[dict[str, Any]]) -> str:
    """Return the kind that ended start `number`. Several faults may have hit this start."""
    hit = [fault for fault in applied if fault.start == number]
    ending = [fault.kind for fault in hit if KINDS[fault.kind].effect == "ends" or fault.kind == "data"]
    others = [fault.kind for fault in hit if KINDS[fault.kind].effect == "continues"]
    return ending[-1] if ending else others[-1] if others else NO_FAULT


def _count_lost_steps(kinds: dict[str, KindResult], applied: Sequence[AppliedFault], starts: Sequence[dict[str, Any]],
                      watch: RunWatch) -> None:
    """Count the steps that were trained again, and attribute them to what ended the start or damaged a checkpoint."""
    trained = 0  # last step of the previous start that trained
    for number in range(1, len(starts) + 1):
        rows = watch.steps_of_start(number)
        if not rows:
            continue
        again = trained - (int(rows[0].values["step"]) - 1)
        if again > 0:
            kinds[_cause_of_repetition(applied, number, starts, watch)].steps_lost += again
        trained = int(rows[-1].values["step"])


def _cause_of_repetition(applied: Sequence[AppliedFault], number: int, starts: Sequence[dict[str, Any]],
                         watch: RunWatch) -> str:
    previous = max((other for other in range(1, number) if watch.steps_of_start(other)), default=number - 1)
    since, until = watch.start_times[previous - 1], watch.start_times[number - 1]
    damage = [fault.kind for fault in applied if since <= fault.time <= until and fault.kind in CHECKPOINT_DAMAGE]
    return damage[-1] if damage else _cause(applied, previous, starts)


def _last_before(applied: Sequence[AppliedFault], time: float) -> str:
    return next((fault.kind for fault in reversed(applied) if fault.time <= time), NO_FAULT)


def count_bad_steps(kinds: dict[str, KindResult], bad_steps: Sequence[int], watch: RunWatch) -> None:
    """Count the steps whose loss was NaN. Recovered are those after which a step had a finite loss again."""
    losses = {row.values["step"]: row.values["loss"] for row in watch.steps()}
    for step in bad_steps:
        if step in losses and losses[step] is None:
            kinds["nan"].faults += 1
            kinds["nan"].recovered += any(losses.get(later) is not None for later in range(step + 1, step + 3))


def measure_goodput(starts: Sequence[dict[str, Any]], faults: Sequence[AppliedFault], watch: RunWatch) -> Goodput:
    """Divide the wall time from the beginning of the first start to the end of the last one."""
    if not starts:
        return Goodput(0.0, 0.0, 0.0)
    kept_s = {row.values["step"]: row.values["step_time_ms"] / 1e3 for row in watch.steps()}
    paused_s = sum(fault.paused_s for fault in faults)
    relaunch_s, end = 0.0, starts[0]["time"]
    for number, start in enumerate(starts, 1):
        rows, previous_end = watch.steps_of_start(number), end
        ended = start["time"] + start["wall_seconds"]
        first = rows[0].time - rows[0].values["step_time_ms"] / 1e3 if rows else ended
        relaunch_s += max(first - previous_end, 0.0)
        end = max(_end_of_training(number, faults, ended), rows[-1].time if rows else first)
    return Goodput(ended - starts[0]["time"], relaunch_s, max(sum(kept_s.values()) - paused_s, 0.0))


def _end_of_training(number: int, faults: Sequence[AppliedFault], ended: float) -> float:
    """Return the time at which a start could train no further: that of the fault which ended it.

    `ended` is the end of its last process. It is also the result for a start that no fault ended, and for a hang: the
    time until the watchdog acts is not a part of the relaunch.
    """
    times = [fault.time for fault in faults if fault.applied and fault.start == number
             and KINDS[fault.kind].effect == "ends" and fault.kind != "hang"]
    return min(times[-1], ended) if times else ended
