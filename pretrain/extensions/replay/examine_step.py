"""Question a step: replay it, compare, repeat if needed, and return the verdict. The caller trains. No torch."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, counted, named
from pretrain.extension import BUILT_IN
from pretrain.extensions.replay.compare import Comparison, compare, compare_loosely
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.record_files import FLIGHT, Header, RankRecord, read_start
from pretrain.extensions.replay.result import CAUSES, SURE, Verdict, judge
from pretrain.extensions.replay.target import Target
from pretrain.monitor.read_run_folder import read_events, read_starts

RECOMPUTATION = "recomputation"  # event of a micro-batch that another rank has computed with another result
_FROM_METRICS = ("loss", "grad_norm", "lr", "loss_scale")
_TOLERANCES = {"fp32": 2e-5, "bf16": 2e-3, "fp16": 2e-3}  # largest relative difference of losses in another layout
_CHANGED_DATA = re.compile(r"rejected: --train_data .* that .* was trained on \(")  # checkpoint/load/same_data.py
_SOFTWARE = ("python", "torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Replay:
    """A finished replay."""

    run: Path  # its run folder
    recorded: dict[int, RankRecord]  # by rank


@dataclass(frozen=True)
class Answer:
    """The verdict, and what it is based on."""

    verdict: Verdict
    notes: list[str]
    replays: list[Replay]
    run: Comparison | None  # None: nothing was trained


Train = Callable[[int, ReplayOrder], Replay]
"""Train a replay with this number, from 1, and return it. Raises ConfigError."""


def read_replay(run: Path) -> Replay:
    """Return the recording in the run folder of a replay. Raises ConfigError if there is none."""
    starts = sorted((run / FLIGHT).glob("start_*"), key=lambda path: int(path.name[6:]))
    recorded = read_start(starts[-1]) if starts else {}
    if not recorded:
        raise ConfigError(str(run), problem="the replay has recorded no step", remedy="see the log next to it")
    return Replay(run, recorded)


def order_of(target: Target) -> ReplayOrder:
    """Return what the ranks of a replay do."""
    vetoed = sorted({step for record in target.recorded.values() for step, row in record.rows.items()
                     if row.get("skipped") == "veto" and target.first_step < step <= target.step})
    return ReplayOrder(target.step, target.consumed_samples, vetoed)


def question(target: Target, train: Train, *, repeats: int, is_other_layout: bool = False) -> Answer:
    """Replay a step, once more if the first replay differs from the run, and return the answer. Raises ConfigError."""
    notes = list(target.notes)
    if target.data_problem and not target.start["flags"].get("allow_other_data"):
        return _other_data(target.data_problem, notes)
    notes += [target.data_problem] if target.data_problem else []
    notes += [f"the run used the extension {name} ({origin}), and the replay does not"
              for name, origin in (target.start.get("extensions") or {}).items() if origin != BUILT_IN]
    order = order_of(target)
    recorded = target.recorded or recorded_in_metrics(target)
    if not target.recorded:
        notes.append("the run has no flight record of these steps: only what metrics.jsonl has is compared (loss, "
                     "gradient norm, learning rate)")
    first = target.first_step + 1
    try:
        replays = [train(1, order)]
    except ConfigError as error:
        if _CHANGED_DATA.search(str(error)) is None:
            raise
        return _other_data(str(error), notes)  # the start of a replay also compares hashes of all bytes
    if is_other_layout:
        return _in_other_layout(target, recorded, replays[0], notes)
    run = compare(recorded, replays[0].recorded, first, target.step,
                  world_size=target.world_size if target.recorded else 0)
    notes += _not_compared(run)
    between: list[Comparison] = []
    while run.step is not None and len(replays) < repeats and not any(each.step for each in between):
        replays.append(train(len(replays) + 1, order))
        between.append(compare(replays[0].recorded, replays[-1].recorded, first, target.step))
    recomputed: list[dict[str, Any]] | None = None
    if run.step is None and _num_data_ranks(target) > 1:
        replays.append(train(len(replays) + 1, replace(order, cross_check=True)))
        recomputed = [event for event in read_events(replays[-1].run) if event["event"] == RECOMPUTATION
                      and event.get("finding") != "off"]
    found = judge(run, between, other_machine=machine_differences(target, replays[0]), recomputed=recomputed)
    return Answer(found, notes, replays, run)


def _other_data(problem: str, notes: list[str]) -> Answer:
    return Answer(Verdict("data_changed", SURE, evidence=[problem], remedy=CAUSES["data_changed"].remedy), notes, [],
                  None)


def _num_data_ranks(target: Target) -> int:
    found = target.start["layout"].get("data_parallel_size")
    return found if isinstance(found, int) else 1


def recorded_in_metrics(target: Target) -> dict[int, RankRecord]:
    """Return what metrics.jsonl has of the steps, as the record of rank 0."""
    rows = {step: {key: row[key] for key in _FROM_METRICS if isinstance(row.get(key), (int, float))}
            for step, row in target.rows.items()}
    return {0: RankRecord(Header(0, target.world_size, "", 0, target.first_step), rows)}


def _not_compared(run: Comparison) -> Iterator[str]:
    """Yield notes on steps and ranks without a record."""
    until = run.last if run.step is None else run.step
    lost = [step for step in range(run.first, until + 1) if step not in run.compared]
    if lost:
        yield (f"{counted(len(lost), 'step')} from {lost[0]} to {lost[-1]} cannot be compared: the run has no record "
               "of them (--flight_steps)")
    if run.missing_ranks:
        yield f"no record of {named('rank', run.missing_ranks)}"


def machine_differences(target: Target, replay: Replay) -> list[str]:
    """Return how versions and hardware of a replay differ from the recorded ones, a line each."""
    try:
        here = read_starts(replay.run)[-1]
    except ConfigError:
        return []
    lines = [f"{name} {here['versions'].get(name)}, recorded {then}"
             for name, then in (target.start.get("versions") or {}).items()
             if name in _SOFTWARE and isinstance(here.get("versions"), dict) and here["versions"].get(name) != then]
    devices, recorded = (_devices(start.get("hardware")) for start in (here, target.start))
    if devices and recorded and devices != recorded:
        lines.append(f"{', '.join(sorted(devices))}, recorded {', '.join(sorted(recorded))}")
    threads, before = ((start.get("environment") or {}).get("OMP_NUM_THREADS") for start in (here, target.start))
    if threads != before:
        lines.append(f"OMP_NUM_THREADS {threads}, recorded {before}")
    return lines


def _devices(hardware: Any) -> set[str]:
    """Return the names of the GPUs, or of the processors if there are none."""
    hosts = [host for host in hardware if isinstance(host, dict)] if isinstance(hardware, list) else []
    gpus = {str(gpu.get("name")) for host in hosts for gpu in host.get("gpus") or [] if isinstance(gpu, dict)}
    return gpus or {str(host.get("cpu")) for host in hosts}


def _in_other_layout(target: Target, recorded: dict[int, RankRecord], replay: Replay, notes: list[str]) -> Answer:
    """Compare with a tolerance. A difference in another layout names no rank."""
    tolerance = _TOLERANCES.get(str(target.start["layout"].get("precision")), _TOLERANCES["bf16"])
    run = compare_loosely(recorded, replay.recorded, target.first_step + 1, target.step, tolerance=tolerance)
    notes += [f"another layout than the run's: not bits are compared, but loss (to {tolerance:g}, relative), gradient "
              f"norm (to {10 * tolerance:g}) and settings", *_not_compared(run)]
    if run.step is None:
        found = judge(run, recomputed=())
        lines = [f"step {run.first} to {run.last}: losses, gradient norms and learning rates are equal within the "
                 "tolerance"]
        return Answer(replace(found, evidence=lines), notes, [replay], run)
    keys = run.differing[0]
    lines = [f"step {run.step}: " + "; ".join(f"{key} {run.one[0][key]} recorded, {run.other[0][key]} replayed"
                                              for key in keys)]
    kind = "settings_changed" if {"lr", "loss_scale"} & set(keys) else \
        "data_changed" if "samples" in keys else "update" if keys == ["skipped"] else "forward"
    found = Verdict(kind, SURE, step=run.step, stage=run.stage, evidence=lines, remedy=CAUSES[kind].remedy)
    if kind in ("forward", "update"):
        found = found.doubt("in another layout the stage and the rank cannot be told: replay it in the layout of the "
                            "run", "backward", "reduction", "update", "memory_weights", "memory_states")
    return Answer(found, notes, [replay], run)
