"""Run baselines in interleaved repetitions: the first one of every baseline, then the second one, and so on.

While one baseline works, the others sleep. So changes in the speed of the machine affect all baselines alike.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.baseline_process import BaselineError, BaselineProcesses, started
from pretrain.bench.processes.context import BenchContext

JobGroup = list[BaselineJob]
"""Jobs that work at the same time and count as one baseline, which has the name of the first job."""


@dataclass
class InterleavedResults:
    """Answers of the baselines, by name. A baseline that failed is in `failures` and not in `answers`."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # values of `RequestLoop.report_build`
    warmups: dict[str, dict[str, Any]] = field(default_factory=dict)  # answer to the warm-up steps
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # one for each request
    failures: list[str] = field(default_factory=list)  # one line for each failed baseline

    def seconds(self, name: str) -> list[float]:
        return [answer["seconds"] for answer in self.answers[name]]

    def losses(self, name: str) -> list[float]:
        """Loss of every step, from the first step of the warm-up."""
        return [*self.warmups[name]["losses"], *(loss for answer in self.answers[name] for loss in answer["losses"])]

    def add(self, other: "InterleavedResults") -> None:
        """Add the results of other baselines."""
        self.facts.update(other.facts)
        self.warmups.update(other.warmups)
        self.answers.update(other.answers)
        self.failures.extend(other.failures)


def run_interleaved(groups: list[JobGroup], context: BenchContext, report: Callable[[str], None], *,
                    steps: int | None = None, warmup_steps: int | None = None,
                    requests: list[dict[str, Any]] | None = None) -> InterleavedResults:
    """Build the baselines one after another, then run the repetitions. Every second repetition is in reverse order.

    Args:
        report: prints a line of progress.
        steps: timed steps of a repetition (default: the preset's).
        warmup_steps: steps before the first repetition (default: the preset's).
        requests: requests of one repetition. Default: one request for its steps. On a GPU one untimed step precedes
            them, because the caching allocator was emptied after the previous repetition.
    """
    settings, results = context.settings, InterleavedResults()
    untimed_steps = 1 if settings.device.kind == "cuda" else 0
    requests = requests or [{"steps": steps or settings.preset.steps, "untimed_steps": untimed_steps}]
    warmup_steps = settings.preset.warmup_steps if warmup_steps is None else warmup_steps
    for together in [groups] if settings.preset.side_by_side else [[group] for group in groups]:
        results.add(_run_together(together, context, report, requests, warmup_steps))
    return results


def _run_together(groups: list[JobGroup], context: BenchContext, report: Callable[[str], None],
                  requests: list[dict[str, Any]], warmup_steps: int) -> InterleavedResults:
    """Run baselines whose processes exist at the same time."""
    settings, results = context.settings, InterleavedResults()
    with started([job for group in groups for job in group], context.folder, settings.timeout_s) as processes:
        unassigned = iter(processes)
        ready = {group[0].name: [next(unassigned) for _ in group] for group in groups}
        for name, group in list(ready.items()):
            report(f"{name}: building")
            with _record_failure(name, ready, results):
                _build(name, group, results, warmup_steps)
        for number in range(settings.repetitions):
            report(f"repetition {number + 1} of {settings.repetitions}")
            for name in list(ready) if number % 2 == 0 else list(reversed(ready)):
                with _record_failure(name, ready, results):
                    results.answers[name] += [_ask(ready[name], do="repeat", **request) for request in requests]
    return results


def _build(name: str, group: list[BaselineProcesses], results: InterleavedResults, warmup_steps: int) -> None:
    for processes in group:
        processes.receive()  # {"imported": True}: the processes have imported their modules
    results.facts[name] = _ask(group, do="build")
    if warmup_steps:
        results.warmups[name] = _ask(group, do="repeat", steps=warmup_steps)
    results.answers[name] = []


def _ask(group: list[BaselineProcesses], **request: Any) -> dict[str, Any]:
    """Send a request to a group. Return its first job's answer, with the mean time of all its jobs."""
    for processes in group:
        processes.send(**request)
    answers = [processes.merged_answer() for processes in group]
    if "seconds" in answers[0]:
        return {**answers[0], "seconds": statistics.fmean(answer["seconds"] for answer in answers)}
    return answers[0]


@contextlib.contextmanager
def _record_failure(name: str, ready: dict[str, list[BaselineProcesses]],
                    results: InterleavedResults) -> Iterator[None]:
    """If the block raises BaselineError, record it, end the baseline's processes and remove it from `ready`."""
    try:
        yield
    except BaselineError as error:
        results.failures.append(str(error))
        results.answers.pop(name, None)
        for processes in ready.pop(name):
            processes.end()
