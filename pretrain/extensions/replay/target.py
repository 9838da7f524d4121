"""Find what a replay begins with: the start that trained the step, a checkpoint, and the data position. No torch."""

import contextlib
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.analysis.recorded_data import OTHER_DATA, open_data_of_step
from pretrain.checkpoint.format.manifest import NOT_FINITE, Manifest
from pretrain.checkpoint.format.run_checkpoints import manifest_or_error, manifests_or_errors, step_of
from pretrain.checkpoint.save.retention import ABANDONED, ROLLBACKS, Rollback, read_rollbacks
from pretrain.errors import ConfigError, counted
from pretrain.extensions.replay.record_files import Header, RankRecord, read_start, start_folder
from pretrain.monitor.read_run_folder import is_number, read_metrics, read_starts
from pretrain.resilience.run_lock import find_owner
from pretrain.stored_json import build

# parts of run.json that must be equal for a checkpoint of an earlier start to lead to the same bits
_SAME = ("layout", "batch", "given_deepspeed_config", "model_config", "seed", "versions")


@dataclass(frozen=True)
class Target:
    """A step of a run, and what its replay begins with."""

    run: Path
    step: int
    number: int  # number of the start that trained the step: index in run.json
    start: dict[str, Any]  # its record in run.json
    checkpoint: Path | None  # None: the beginning of the start, with new or initial weights
    first_step: int  # steps done before the first step of the replay
    consumed_samples: int | None  # data position of the replay's first step; None: the start's own
    recorded: dict[int, RankRecord] = field(default_factory=dict)  # by rank
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # rows of metrics.jsonl, by step
    notes: tuple[str, ...] = ()
    data_problem: str = ""  # why the training data is not that of the start

    @property
    def world_size(self) -> int:
        return int(self.start["layout"]["world_size"])


def parse_target(text: str) -> tuple[Path, int]:
    """Return run folder and step of RUN@STEP. Raises ConfigError."""
    run, at, step = text.rpartition("@")
    if not at or not run or not (step.isdecimal() and step.isascii()) or not 0 < int(step[:19]) < 2**63:
        raise ConfigError("RUN@STEP", found=repr(text), expected="a run folder and a step from 1 on, such as "
                          "runs/gpt2@41203")
    return Path(run), int(step)


def find_target(run: Path, step: int, before_rollback: int | None = None) -> Target:
    """Find start, checkpoint and data position for a step. Raises ConfigError if the step cannot be trained again.

    Of a step that was trained several times, the last time counts, or the last one before rollback number
    `before_rollback`, from 1.

    If the data is another one now and can be read, its start allows that (--allow_other_data).
    """
    target = _find_target(run, step, before_rollback)
    if target.start["flags"].get("dataset_module"):  # code of the user, which a record alone never imports
        return target
    try:
        open_data_of_step(run, target.start)
    except ConfigError as error:
        is_readable = OTHER_DATA in str(error)
        flags = {**target.start["flags"], **({"allow_other_data": True} if is_readable else {})}
        return replace(target, start={**target.start, "flags": flags}, data_problem=str(error))
    return target


def _find_target(run: Path, step: int, before_rollback: int | None) -> Target:
    if not run.is_dir():
        problem = "this is a file, and not a folder" if run.exists() else "there is no such folder"
        raise ConfigError(str(run), problem=problem, remedy="name a run folder: the value of --save")
    starts = read_starts(run)
    owner = find_owner(run)
    if owner is not None:
        raise ConfigError(str(run), problem=f"the run is still training ({owner})",
                          remedy="stop it, or wait until it ends: the replay needs its machines and its checkpoints")
    until = _time_of_rollback(run, before_rollback)
    metrics = {row["step"]: row for row in read_metrics(run) if "loss" in row and not _time(row) >= until}
    number, recorded = _start_of_step(run, starts, step, metrics, until)
    checked = _checked(run, starts[number])
    before, after = _rollbacks(run, _moment(recorded, metrics, step))
    lowest = _lowest_start(starts, number)
    recorded = _with_earlier_rows(run, starts, lowest, number, recorded)
    # a rollback continues at another data position: only checkpoints from after it lead to the step
    earliest = max([int(starts[lowest].get("first_step") or 0), *(each.to_step for each in before
                                                                  if each.to_step < step)])
    notes = [f"step {step} was trained again after rollback {each}; this is about the last time: --before_rollback "
             f"{each} is about the time before" for each, rollback in enumerate(before, 1)
             if rollback.to_step < step <= rollback.last_step][-1:]
    notes += _overrides(checked)
    problems: list[str] = []
    for folder, manifest in _candidates(run, starts[lowest]):
        if isinstance(manifest, ConfigError):
            problems.append(f"not used: {manifest}")
        elif earliest <= manifest.step < step and not manifest.weights_only and _is_on_path(manifest, before, after):
            if manifest.is_good:
                own = folder.absolute().is_relative_to(run.absolute())
                return Target(run, step, number, checked, folder, manifest.step,
                              _position(manifest, before) if own else None, recorded, metrics, (*notes, *problems))
            problems.append(f"not used: {folder}: {NOT_FINITE}")
    if earliest == 0 and not starts[lowest].get("resumed_from"):
        return Target(run, step, number, checked, None, 0, None, recorded, metrics, (*notes, *problems))
    because = f" ({problems[0].rstrip('.')})" if problems else ""
    raise ConfigError(f"{run}@{step}", problem=f"no checkpoint of the steps {earliest} to {step - 1} remains, from "
                      f"which the run trained this step{because}",
                      remedy="give a later step; --keep_every keeps more checkpoints of the next run")


def _checked(run: Path, start: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a start. Raises ConfigError if parts are missing that a replay needs."""
    parts = {name: start.get(name) for name in ("flags", "layout", "given_deepspeed_config", "model_config")}
    wrong = [name for name, value in parts.items() if not isinstance(value, dict)]
    types = {"command": dict, "environment": dict, "hardware": list, "batch": dict, "versions": dict, "overrides": list}
    wrong += [name for name, kind in types.items() if not isinstance(start.get(name, kind()), kind)]
    wrong += ["hardware"] * (not wrong and not all(isinstance(host, dict) for host in start.get("hardware", [])))
    layout = start.get("layout")
    if not wrong and not (isinstance(layout, dict) and isinstance(layout.get("world_size"), int)
                          and 0 < layout["world_size"] < 100_000):
        wrong = ["layout: world_size"]
    if wrong:
        raise ConfigError(f"{run}: run.json", problem=f"the record of the start is damaged or of another program: "
                          f"{wrong[0]}", remedy="restore run.json")
    return start


def _overrides(start: dict[str, Any]) -> list[str]:
    """Return a note on each setting that the start changed: its steps are reproducible with the changed value."""
    return [f"from step {int(each.get('step') or 0) + 1} on, {each.get('setting')} was changed from {each.get('from')} "
            f"to {each.get('to')} (--override {each.get('name')})"
            for each in start.get("overrides") or [] if isinstance(each, dict) and is_number(each.get("step") or 0)]


def _time_of_rollback(run: Path, number: int | None) -> float:
    """Return when a rollback was, in seconds since 1970; without a number, the end of time. Raises ConfigError."""
    found = read_rollbacks(run / "checkpoints")
    if number is not None and number > len(found):
        raise ConfigError(f"--before_rollback {number}", problem=f"the run has had {counted(len(found), 'rollback')}",
                          remedy=f"see {run / ROLLBACKS}")
    return math.inf if number is None else found[number - 1].time


def _time(row: dict[str, Any]) -> float:
    found = row.get("time")
    return float(found) if is_number(found) else 0.0


def _start_of_step(run: Path, starts: list[dict[str, Any]], step: int, metrics: dict[int, dict[str, Any]],
                   until: float) -> tuple[int, dict[int, RankRecord]]:
    """Return the last start that trained the step before a time, and its flight records. Raises ConfigError."""
    last_logged = max(metrics, default=0)
    reached = 0
    newest = max((number for number, start in enumerate(starts) if _time(start) < until), default=-1)
    for number in range(newest, -1, -1):
        recorded = _valid(read_start(start_folder(run, number), before=until))
        last = max((max(each.rows, default=0) for each in recorded.values()), default=0)
        if number == newest or not recorded:
            last = max(last, last_logged)
        reached = max(reached, last)
        if int(starts[number].get("first_step") or 0) < step <= last:
            return number, recorded
    first = 1 + min((int(start.get("first_step") or 0) for start in starts), default=0)
    raise ConfigError(f"{run}@{step}", problem=f"the run has trained the steps {first} to {reached}" if reached else
                      "the run has recorded no step", remedy="give a step that it has trained")


def _valid(recorded: dict[int, RankRecord]) -> dict[int, RankRecord]:
    """Return the records whose headers have values of the right types."""
    found = {}
    for rank, record in recorded.items():
        with contextlib.suppress(ValueError):
            build(Header, asdict(record.header))
            found[rank] = record
    return found


def _moment(recorded: dict[int, RankRecord], metrics: dict[int, dict[str, Any]], step: int) -> float | None:
    """Return when the step was trained, in seconds since 1970; None if no row has it."""
    rows = [each.rows.get(step, {}) for each in recorded.values()] + [metrics.get(step, {})]
    return next((_time(row) for row in rows if _time(row)), None)


def _lowest_start(starts: list[dict[str, Any]], number: int) -> int:
    """Return the earliest start from which only resumes without a change lead to start `number`."""
    lowest = number
    while lowest > 0 and (starts[lowest].get("first_step") or 0) > 0 and all(
            starts[lowest - 1].get(name) == starts[number].get(name) for name in _SAME):
        lowest -= 1
    return lowest


def _with_earlier_rows(run: Path, starts: list[dict[str, Any]], lowest: int, number: int,
                       recorded: dict[int, RankRecord]) -> dict[int, RankRecord]:
    """Return the records of start `number` with the rows that the earlier starts from `lowest` on add."""
    found = dict(recorded)
    for earlier in range(number - 1, lowest - 1, -1):
        last = int(starts[earlier + 1].get("first_step") or 0)
        for rank, record in _valid(read_start(start_folder(run, earlier))).items():
            if rank in found:
                rows = {step: row for step, row in record.rows.items() if step <= last}
                found[rank] = replace(found[rank], rows={**rows, **found[rank].rows})
    return found


def _rollbacks(run: Path, moment: float | None) -> tuple[list[Rollback], list[Rollback]]:
    """Return the rollbacks before and after a time."""
    found = read_rollbacks(run / "checkpoints")
    before = [each for each in found if moment is None or each.time < moment]
    return before, found[len(before):]


def _is_on_path(manifest: Manifest, before: list[Rollback], after: list[Rollback]) -> bool:
    """Return whether the run had the checkpoint between these rollbacks, and had not abandoned it."""
    return all(manifest.save_id not in each.abandoned.values() for each in before) and all(
        manifest.step <= each.to_step or manifest.save_id in each.abandoned.values() for each in after)


def _candidates(run: Path, start: dict[str, Any]) -> list[tuple[Path, Manifest | ConfigError]]:
    """Return the run's checkpoints, and that of another run from which the start branched, the highest step first."""
    checkpoints = run / "checkpoints"
    found = [each for folder in (checkpoints, *checkpoints.glob(f"{ABANDONED}*"))
             for each in manifests_or_errors(folder)]
    source = start.get("resumed_from")
    if isinstance(source, str) and Path(source).is_dir() and not Path(source).is_relative_to(checkpoints.absolute()):
        found.append((Path(source), manifest_or_error(Path(source))))
    return sorted(found, key=lambda each: step_of(each[0]), reverse=True)


def _position(manifest: Manifest, rollbacks: list[Rollback]) -> int:
    """Return the data position after a checkpoint, at the time of these rollbacks."""
    return [manifest.consumed_samples, *(each.consumed_samples for each in rollbacks
                                         if (each.to_step, each.save_id) == (manifest.step, manifest.save_id))][-1]
