"""The kinds of faults, and the schedule of a run: a pure function of the seed, the kinds, and the numbers of faults and
steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

T = TypeVar("T")
Effect = Literal["ends", "damages", "continues"]
_STARTING_FRACTION = 0.15  # fraction of the faults that end a start: they hit the run before its first step
_STEPS_WITH_FAULTS = 0.8  # fraction of the run: between a signal and the save that it causes, there may be many steps
_MAY_HIT_A_START = ("kill_rank", "kill_launcher", "signal")
_FIRST_BAD_STEP = 3


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    effect: Effect  # "ends": the start ends; "damages": files that the next start reads; "continues": no restart needed
    about: str


KINDS = {
    "kill_rank": Kind("ends", "SIGKILL to one rank"),
    "kill_launcher": Kind("ends", "SIGKILL to a launcher"),
    "signal": Kind("ends", "SIGTERM, SIGINT or SIGUSR1 to one rank, to all ranks or to the launcher"),
    "hang": Kind("ends", "SIGSTOP to one rank, until the watchdog ends the run"),
    "cut_link": Kind("ends", "shut down the TCP connections of one rank"),
    "pause": Kind("continues", "SIGSTOP to one rank, and SIGCONT up to 2 seconds later"),
    "nan": Kind("continues", "a batch with a loss of NaN on one data-parallel rank"),
    "disk_full": Kind("continues", "checkpoint writes fail with ENOSPC until a save has failed"),
    "bit_flip": Kind("damages", "one bit of a file of the newest checkpoint"),
    "truncate": Kind("damages", "a file of the newest checkpoint is cut off"),
    "delete": Kind("damages", "a file of the newest checkpoint is deleted"),
    "latest": Kind("damages", "the file `latest` of the checkpoints is overwritten"),
    "data": Kind("damages", "the training data is cut off during one start"),
}
CHECKPOINT_DAMAGE = ("bit_flip", "truncate", "delete")


@dataclass(frozen=True)
class Fault:
    """A fault, and when it is applied."""

    kind: str
    step: int  # the fault is applied when this step has been logged
    when: Literal["running", "down", "starting"]  # "down": no process of the run exists
    delay: float  # running: fraction of a step to wait; starting: fraction of the time from start to first step
    seed: int  # seed of the random choices: process, signal, file, bit


@dataclass(frozen=True)
class Schedule:
    """All faults of a run."""

    faults: list[Fault]  # in the order in which they are applied
    bad_steps: list[tuple[int, int]]  # (step whose loss is NaN, rank: modulo the data-parallel ranks), in both runs


def make_schedule(kinds: Sequence[str], *, faults: int, seed: int, train_steps: int) -> Schedule:
    """Return `faults` faults of these kinds, each about equally often, for a run of `train_steps` steps.

    Faults that end a start are spread evenly over the run. Damage to files happens just before such an end.
    """
    random = Random(seed)
    drawn = _draw(kinds, faults, random)
    ending = [kind for kind in drawn if KINDS[kind].effect == "ends"]
    last = max(1, round(_STEPS_WITH_FAULTS * train_steps))
    ends = [max(1, round(last * (number + random.uniform(0.5, 1.0)) / len(ending))) for number in range(len(ending))]
    found: list[tuple[tuple[int, int], Fault]] = []  # (position in the order, fault)
    for number, kind in enumerate(ending):
        hits_start = number > 0 and kind in _MAY_HIT_A_START and random.random() < _STARTING_FRACTION
        step, order = (ends[number - 1], 2) if hits_start else (ends[number], 1)
        found.append(((step, order), Fault(kind, step, "starting" if hits_start else "running", random.random(),
                                           random.randrange(2**31))))
    places = _draw([fault.step for _, fault in found if fault.when == "running"] or [last], faults, random)
    for kind in drawn:
        if KINDS[kind].effect != "ends" and kind != "nan":
            damages = KINDS[kind].effect == "damages"
            step = places.pop() if damages else random.randint(1, last)
            is_down = kind == "data" or (damages and random.random() < 0.5)
            found.append(((step, 0), Fault(kind, step, "down" if is_down else "running", random.random(),
                                           random.randrange(2**31))))
    found.sort(key=lambda item: item[0])
    return Schedule([fault for _, fault in found], _bad_steps(drawn.count("nan"), train_steps, random))


def _draw(values: Sequence[T], count: int, random: Random) -> list[T]:
    """Return `count` values in random order, each about equally often."""
    drawn: list[T] = []
    while len(drawn) < count:
        drawn += random.sample(list(values), len(values))
    return drawn[:count]


def _bad_steps(count: int, train_steps: int, random: Random) -> list[tuple[int, int]]:
    """Choose steps of which no two are adjacent: the guard acts on several bad steps in a row, a single one is skipped.
    """
    possible = range(_FIRST_BAD_STEP, train_steps - 1, 2)
    chosen = sorted(random.sample(possible, min(count, len(possible))))
    return [(step, random.randrange(1024)) for step in chosen]
