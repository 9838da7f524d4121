"""Contenders side by side, taking turns: while one works, the others sleep."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pretrain.bench.processes.baseline_job import Job, Workshop
from pretrain.bench.processes.baseline_process import Child, ContenderError, children

Say = Callable[[str], None]
Side = list[Job]
"""Jobs that work at the same time: one, or several that are compared together with another side."""


@dataclass(frozen=True)
class Section:
    """The answer to one word of --what."""

    what: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # a line each
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Turns:
    """By the name of each side's first job; a side that failed is in `failures` alone."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # after building
    warmups: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def seconds(self, name: str) -> list[float]:
        return [answer["seconds"] for answer in self.answers[name]]

    def losses(self, name: str) -> list[float]:
        """From the first step on."""
        return [*self.warmups[name]["losses"], *(loss for answer in self.answers[name] for loss in answer["losses"])]

    def fail(self, name: str, error: ContenderError) -> None:
        self.failures.append(str(error))
        self.answers.pop(name, None)

    def add(self, other: "Turns") -> None:
        self.facts.update(other.facts)
        self.warmups.update(other.warmups)
        self.answers.update(other.answers)
        self.failures.extend(other.failures)


def spread(values: list[float]) -> float:
    """(highest - lowest) / median: how much the rounds differ."""
    return (max(values) - min(values)) / statistics.median(values)


def take_turns(sides: list[Side], workshop: Workshop, say: Say, *, steps: int | None = None,
               warmup_steps: int | None = None, requests: list[dict[str, Any]] | None = None) -> Turns:
    """Build each side, one after another; then the rounds, every second one in reverse order.

    Args:
        steps, warmup_steps: of a round, and before the first one (default: the preset's).
        requests: of one round (default: its steps, after an untimed one on a GPU, whose allocator begins anew).
    """
    settings, turns = workshop.settings, Turns()
    untimed = 1 if settings.device.kind == "cuda" else 0
    requests = requests or [{"steps": steps or settings.preset.steps, "untimed": untimed}]
    warmup_steps = settings.preset.warmup_steps if warmup_steps is None else warmup_steps
    for together in [sides] if settings.preset.side_by_side else [[side] for side in sides]:
        turns.add(_rounds(together, workshop, say, requests, warmup_steps))
    return turns


def _rounds(sides: list[Side], workshop: Workshop, say: Say, requests: list[dict[str, Any]],
            warmup_steps: int) -> Turns:
    settings, turns = workshop.settings, Turns()
    with children([job for side in sides for job in side], workshop.folder, settings.timeout_s) as started:
        unassigned = iter(started)
        ready = {side[0].name: [next(unassigned) for _ in side] for side in sides}
        for name, side in list(ready.items()):
            say(f"{name}: building")
            with _left_out_if_it_fails(name, ready, turns):
                _build(name, side, turns, warmup_steps)
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}")
            for name in list(ready) if number % 2 == 0 else list(reversed(ready)):
                with _left_out_if_it_fails(name, ready, turns):
                    turns.answers[name] += [_ask(ready[name], do="round", **request) for request in requests]
    return turns


def _build(name: str, side: list[Child], turns: Turns, warmup_steps: int) -> None:
    for child in side:
        child.receive()  # that its imports are done
    turns.facts[name] = _ask(side, do="build")
    if warmup_steps:
        turns.warmups[name] = _ask(side, do="round", steps=warmup_steps)
    turns.answers[name] = []


def _ask(side: list[Child], **request: Any) -> dict[str, Any]:
    """One side's answer: rank 0's of its first job, with the mean time of all its jobs."""
    for child in side:
        child.send(**request)
    answers = [child.answer() for child in side]
    if "seconds" in answers[0]:
        return {**answers[0], "seconds": statistics.fmean(answer["seconds"] for answer in answers)}
    return answers[0]


@contextlib.contextmanager
def _left_out_if_it_fails(name: str, ready: dict[str, list[Child]], turns: Turns) -> Iterator[None]:
    try:
        yield
    except ContenderError as error:
        turns.fail(name, error)
        for child in ready.pop(name):
            child.end()
