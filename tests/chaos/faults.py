"""The kinds of faults, and the schedule of a run: a pure function of the seed, the kinds, and the numbers of faults and
steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

T = TypeVar("T")
Effect = Literal["ends", "damages", "continues"]
Moment = Literal["running", "down", "starting"]
_ENDING_FRACTION = 0.25  # of all faults; the others share the restarts, because a restart takes longer than a step
_STARTING_FRACTION = 0.15  # of the faults that end a start: they hit the run before its first step
_STEPS_WITH_FAULTS = 0.8  # fraction of the run: between a signal and the save that it causes, there may be many steps
_MAY_HIT_A_START = ("kill_rank", "kill_launcher", "signal")
_FIRST_BAD_STEP = 3


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    effect: Effect  # "ends": the start ends; "damages": files that the next start reads; "continues": no restart needed
    about: str


KINDS = {kind.name: kind for kind in (
    Kind("kill_rank", "ends", "SIGKILL to one rank"),
    Kind("kill_launcher", "ends", "SIGKILL to a launcher"),
    Kind("signal", "ends", "SIGTERM, SIGINT or SIGUSR1 to one rank, to all ranks or to the launcher"),
    Kind("hang", "ends", "SIGSTOP to one rank, until the watchdog ends the run"),
    Kind("cut_link", "ends", "shut down the TCP connections of one rank"),
    Kind("pause", "continues", "SIGSTOP to one rank, and SIGCONT up to 2 seconds later"),
    Kind("nan", "continues", "a batch with a loss of NaN on one data-parallel rank"),
    Kind("disk_full", "continues", "checkpoint writes fail with ENOSPC until a save has failed"),
    Kind("bit_flip", "damages", "one bit of a file of the newest checkpoint"),
    Kind("truncate", "damages", "a file of the newest checkpoint is cut off"),
    Kind("delete", "damages", "a file of the newest checkpoint is deleted"),
    Kind("latest", "damages", "the file `latest` of the checkpoints is overwritten"),
    Kind("data", "damages", "the training data is cut off during one start"),
)}
CHECKPOINT_DAMAGE = ("bit_flip", "truncate", "delete")


@dataclass(frozen=True)
class Fault:
    """A fault, and when it is applied."""

    kind: str
    step: int  # the fault is applied when this step has been logged
    moment: Moment  # while the run is training, while no process of the run exists, or while the run is starting
    delay: float  # running: fraction of a step to wait; starting: fraction of the time from start to first step
    seed: int  # of the random choices: process, signal, file, bit


@dataclass(frozen=True)
class BadStep:
    """A step whose loss is NaN on one data-parallel rank, in the run and in its reference."""

    step: int
    rank: int  # modulo the number of data-parallel ranks


@dataclass(frozen=True)
class Schedule:
    """All faults of a run."""

    faults: list[Fault]  # in the order in which they are applied
    bad_steps: list[BadStep]


def make_schedule(kinds: Sequence[str], *, faults: int, seed: int, train_steps: int) -> Schedule:
    """Return `faults` faults of these kinds for a run of `train_steps` steps.

    Faults that end a start are spread evenly over the run. Damage to files happens just before or after such an end.
    """
    random = Random(seed)
    can_end = [kind for kind in kinds if KINDS[kind].effect == "ends"]
    others = [kind for kind in kinds if KINDS[kind].effect != "ends"]
    num_ends = faults if not others else min(faults, max(1, math.ceil(faults * _ENDING_FRACTION))) if can_end else 0
    other_kinds = _draw(others, faults - num_ends, random)
    bad_steps = _bad_steps(other_kinds.count("nan"), train_steps, random)
    interval = _STEPS_WITH_FAULTS * train_steps / max(num_ends, 1)
    ends = [max(1, round(interval * (number + random.uniform(0.5, 1.0)))) for number in range(num_ends)]
    groups: list[list[Fault]] = [[] for _ in range(max(num_ends, 1))]
    places = _draw(list(range(len(groups))), faults, random)
    for kind, place in zip((kind for kind in other_kinds if kind != "nan"), places, strict=False):
        last = ends[place] if ends else max(1, int(_STEPS_WITH_FAULTS * train_steps))
        first = ends[place - 1] if place else 1
        groups[place].append(_other_fault(kind, first, last, random))
    for number, kind in enumerate(_draw(can_end, num_ends, random)):
        end = _ending_fault(kind, ends[number], number, random)
        before = [] if end.moment == "starting" else sorted(groups[number], key=_order)
        after = sorted(groups[number], key=_order) if end.moment == "starting" else []
        groups[number] = [*before, end, *after]
    if not ends:
        groups[0].sort(key=_order)
    return Schedule([fault for group in groups for fault in group], bad_steps)


def _draw(values: Sequence[T], count: int, random: Random) -> list[T]:
    """Return `count` values in random order, each about equally often."""
    drawn: list[T] = []
    while values and len(drawn) < count:
        drawn += random.sample(list(values), len(values))
    return drawn[:count]


def _bad_steps(count: int, train_steps: int, random: Random) -> list[BadStep]:
    """Choose steps of which no two are adjacent: the guard acts on several bad steps in a row, a single one is skipped.
    """
    possible = range(_FIRST_BAD_STEP, train_steps - 1, 2)
    chosen = sorted(random.sample(possible, min(count, len(possible))))
    return [BadStep(step, random.randrange(1024)) for step in chosen]


def _other_fault(kind: str, first: int, last: int, random: Random) -> Fault:
    seed, delay = random.randrange(2**31), random.random()
    if KINDS[kind].effect == "continues":
        return Fault(kind, random.randint(first, max(first, last - 1)), "running", delay, seed)
    moment: Moment = "down" if kind == "data" or random.random() < 0.5 else "running"
    return Fault(kind, last, moment, delay, seed)


def _ending_fault(kind: str, step: int, number: int, random: Random) -> Fault:
    hits_start = number > 0 and kind in _MAY_HIT_A_START and random.random() < _STARTING_FRACTION
    return Fault(kind, step, "starting" if hits_start else "running", random.random(), random.randrange(2**31))


def _order(fault: Fault) -> tuple[bool, int]:
    """Sort key within a group: faults while the run is down are handed over last, before the end of the start."""
    return fault.moment == "down", fault.step
