"""Incidents of a run, in plain words and the newest first: events, crashes, and loss curves that end in NaN.

Incidents of one kind that follow each other are one entry.
"""

import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from pretrain.active_extensions import advice_on, problems
from pretrain.analysis.run_table import RunTable, as_float, events_and_crashes, kept_rows, number_or_none
from pretrain.errors import GUARD, listed, named, printable, shorten
from pretrain.extension import Problem
from pretrain.resilience.lease_file import read_lease
from pretrain.resilience.run_lock import LOCK

_LONGEST_TEXT = 400  # characters
_LISTED = 8  # in a terminal
_SILENT_S = 600.0  # a run that writes no row for this long, and for 20 times the usual interval, is reported
_START_AGAIN = "; start the run again"

# by kind: the name of the event, or what the end of the files shows; extensions may advise more
_KINDS: dict[str, Problem] = {
    "corruption": Problem("copies of a parameter differ between ranks: {reason}",
                          "do not trust the machine", ("start",)),
    "spike": Problem("{reason}"),
    "skip": Problem("an update was skipped: {reason}"),
    "not_finite": Problem("the loss is NaN or infinite", over=()),
    "rollback": Problem("the run returned to an earlier checkpoint: {reason}"),
    "hang": Problem("the run hung: {reason}", "read the stacks of all ranks in {path}; look at the machine of the rank "
                    "that is named", ("start",)),
    "crash": Problem("the run crashed: {reason}", f"read the last lines of the launcher's output{_START_AGAIN}",
                     ("start",)),
    "not_started": Problem("the run could not start: {reason}", "repair the host",
                           ("start",)),
    "rejected": Problem("the run was rejected: {reason}", "correct the flag that the launcher's output names",
                        ("start",)),
    "silent": Problem("{reason}", "look at the launcher's output, and at the machine of rank 0", ("start",)),
    "guard": Problem("the guard against bad steps stopped the run: {reason}",
                     "another start alone does not help", ("start",)),
    "save_failed": Problem("a checkpoint was not written: {reason}", "make space, or repair the storage",
                           ("save", "start")),
    "after_save_failed": Problem("a checkpoint was not mirrored, or older ones not removed: {reason}",
                                 "look at the storage", ("mirror", "prune", "start", "finished")),
    "verify": Problem("{reason}"),
}


@dataclass(frozen=True)
class Incident:
    """One thing that went wrong, or several of one kind that follow each other."""

    kind: str
    text: str  # what happened, on one line
    advice: str
    step: int | None
    last_step: int | None
    time: float | None  # seconds since 1970
    last_time: float | None
    count: int = 1
    is_open: bool = False  # it is wrong now, as far as the files know
    subject: str = ""  # what it is about: incidents with another subject are not joined
    machine: str = ""  # ranks and hosts, if known
    detail: str = ""  # what shows it

    @property
    def steps_text(self) -> str:
        if self.step is None:
            return ""
        if self.is_open and self.count == 1:
            return f"since step {self.step:,}"
        if self.last_step in (None, self.step):
            return f"step {self.step:,}"
        return f"steps {self.step:,} to {self.last_step:,}"

    @property
    def headline(self) -> str:
        """A line about what happened; of several incidents their number, and the newest."""
        if self.count == 1:
            return self.text
        return f"{self.count:,} times, most recently: {self.text}"


def incidents_of(table: RunTable, *, now: float | None = None) -> list[Incident]:
    """Return what went wrong: first what is wrong now, then the rest, each the newest first."""
    rows, known = events_and_crashes(table), {**problems(), **_KINDS}
    found = [incident for number in range(len(rows)) if (incident := _incident(table, rows, number, known))]
    found += _of_the_end(table, time.time() if now is None else now)
    joined = _joined(found, gap=max(100, _last_step(table) // 20))
    return sorted(joined, key=lambda one: (not one.is_open, -(one.last_time or one.time or 0.0), -(one.step or 0)))


def incident_lines(incidents: Sequence[Incident], results: Sequence[tuple[int, str]] = ()) -> list[str]:
    """Return the list for a terminal, in two lines of 80 characters each at most; [] if nothing went wrong.

    It has what happened, and what to do, or the result of an examination of a step: `results` has (step, text).
    """
    if not incidents:
        return []
    lines = ["what went wrong (! = still wrong)"]
    for one in incidents[:_LISTED]:
        when = time.strftime("%m-%d %H:%M", time.localtime(one.time)) if one.time is not None else ""
        parts = [part for part in (when, one.steps_text, one.machine, one.headline) if part]
        line = f"{'!' if one.is_open else ' '} {': '.join((', '.join(parts[:-1]), parts[-1]))}"
        found = [text for step, text in results
                 if one.step is not None and one.last_step is not None and one.step <= step <= one.last_step]
        advice = printable(found[0] if found else one.advice)
        for text, indent in ((line, 4), *([(f"    -> {advice}", 7)] if advice else [])):
            lines += textwrap.wrap(text, 80, subsequent_indent=" " * indent, max_lines=2, placeholder=" ...",
                                   drop_whitespace=True, break_on_hyphens=False)
    more = len(incidents) - _LISTED
    return [*lines, *([", ".join([f"  and {more} more", *advice_on("more_incidents")])] if more > 0 else [])]


def _incident(table: RunTable, rows: list[dict[str, Any]], number: int,
              known: Mapping[str, Problem]) -> Incident | None:
    row = rows[number]
    kind = str(row.get("event"))
    if kind == "stop" and row.get("exit_code") == GUARD:
        kind = "guard"
    problem = known.get(kind)
    if problem is None or (problem.unless and row.get(problem.unless[0]) == problem.unless[1]):
        return None
    end = None if problem.over is None else next((after for after in islice(rows, number + 1, None)
                                                  if _ends(problem, row, after)), None)
    step = _step(row.get("since" if problem.is_phase else "step"))
    machine, reason = _machine(row), printable(str(row.get("reason") or ""))
    what, advice, detail = problem.text.format(reason=reason), _advice_on(kind, problem), ""
    subject = str(row.get("name") or re.sub(r"\d+", "", reason))
    last, when = _step(row.get("step")), _time(row)
    if problem.is_phase:
        subject = f"{row.get('ranks')} {row.get('hosts')}"
        if end is not None and _names_end(end):
            last, when = _step(end.get("step")), _time(end) or when
    if not isinstance(problem.describe, str):
        what, advice, detail = problem.describe(row, machine, is_over=end is not None)
        machine = ""
    if end is not None:  # it has ended by itself, or the run was started again
        advice = "" if end.get("event") != "start" else advice.replace(_again(), "")
    advice = _advice(advice, table, step, row.get("path"))
    return Incident(kind, shorten(what, _LONGEST_TEXT).rstrip(": "), advice, step, last, _time(row), when,
                    is_open=problem.over is not None and end is None, subject=subject,
                    machine=machine, detail=shorten(detail, _LONGEST_TEXT))


def _advice_on(kind: str, problem: Problem) -> str:
    """Return what to do: of the problem, and of extensions."""
    return "; ".join(filter(None, [problem.advice.replace(_START_AGAIN, _again()), *advice_on(kind)]))


def _again() -> str:
    """Return how a run is started again."""
    return ", or ".join([_START_AGAIN, *advice_on("start_again")])


def _advice(text: str, table: RunTable, step: int | None, path: object = None) -> str:
    run = shorten(printable(str(table.run)), 200)
    return text.format(run=run, step="STEP" if step is None else step,
                       path=shorten(printable(path), 200) if isinstance(path, str) else f"{run}/hangs")


def _ends(problem: Problem, row: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether the later event `after` says that an incident is over."""
    name, over = after.get("event"), problem.over or ()
    if name == "stop" and after.get("reason") == "finished" and "finished" in over:
        return True
    if problem.is_phase and name in over and _names_end(after):
        ranks, recovered = row.get("ranks"), after.get("ranks")
        return not (isinstance(ranks, list) and isinstance(recovered, list)) or any(each in recovered for each in ranks)
    return name in over


def _names_end(event: dict[str, Any]) -> bool:
    """Return whether an event says that a problem is over, and not that the run starts or stops."""
    return event.get("event") not in ("start", "stop")


def _machine(row: dict[str, Any]) -> str:
    """Return the ranks and hosts of an event as text, or ""."""
    ranks, hosts = ([printable(shorten(value, 60)) for value in dict.fromkeys(map(str, values))]
                    if isinstance(values := row.get(key), list) else [] for key in ("ranks", "hosts"))
    return " on ".join([*([named("rank", ranks)] if ranks else []), *([listed(hosts)] if hosts else [])])


def _of_the_end(table: RunTable, now: float) -> Iterable[Incident]:
    """Yield what the end of the files shows: a loss that is not finite, a process that is dead or silent."""
    kept = kept_rows(table.training)
    steps, losses, times = (table.training.column(key)[kept] for key in ("step", "loss", "time"))
    finite = np.flatnonzero(np.isfinite(losses))
    first_bad = int(finite[-1]) + 1 if len(finite) else 0
    if first_bad < len(losses):
        yield _at_the_end("not_finite", table, int(steps[first_bad]), int(steps[-1]), number_or_none(times[first_bad]))
    ends = ("start", "stop", "hang")
    newest: dict[str, Any] = next((event for event in reversed(table.events) if event.get("event") in ends), {})
    reported = [as_float(row.get("time")) + as_float(row.get("wall_seconds")) for row in table.restarts]
    began = as_float(newest.get("time"))
    if newest.get("event") != "start" or any(end >= began for end in reported):
        return
    times = times[np.isfinite(times)]
    last, step = max([began, *times[-1:]]), int(steps[-1]) if len(steps) else _step(newest.get("step"))
    lease = read_lease(table.run / LOCK)
    runs = lease.owner.runs() if lease is not None and not lease.released else None
    age = now - last
    interval = float(np.median(np.diff(times[-50:]))) if len(times) > 2 else 0.0
    if lease is not None and runs is False:
        reason = (f"the run is dead: its process {lease.owner.pid} on {printable(lease.owner.host)} ended without a "
                  "report (killed, or out of memory)")
        yield replace(_at_the_end("crash", table, step, step, last), text=reason)
    elif age > max(_SILENT_S, 20 * interval):
        reason = f"no row for {_duration(age)}: the run hangs, or ended without a report"
        yield replace(_at_the_end("silent", table, step, step, last), text=reason)


def _at_the_end(kind: str, table: RunTable, step: int | None, last_step: int | None, when: float | None) -> Incident:
    problem = _KINDS[kind]
    advice = _advice(_advice_on(kind, problem), table, step)
    return Incident(kind, problem.text, advice, step, last_step, when, when, is_open=True)


def _joined(incidents: list[Incident], *, gap: int) -> list[Incident]:
    """Join incidents of one kind and subject of which each begins at most `gap` steps after another."""
    joined: list[Incident] = []
    newest: dict[tuple[str, str, str, bool], int] = {}  # -> index in `joined`
    for one in incidents:
        key = (one.kind, one.subject, one.machine, one.is_open)
        at = newest.get(key)
        last = joined[at].last_step if at is not None else None
        if at is not None and last is not None and one.step is not None and one.step - last <= gap:
            before = joined[at]
            steps = [step for step in (before.step, before.last_step, one.step, one.last_step) if step is not None]
            joined[at] = replace(one, step=min(steps), last_step=max(steps), time=before.time, count=before.count + 1)
            continue
        newest[key] = len(joined)
        joined.append(one)
    return joined


def _last_step(table: RunTable) -> int:
    steps = table.training.column("step")
    return int(steps[-1]) if len(steps) else 0


def _step(value: object) -> int | None:
    number = as_float(value)
    return int(number) if 0 <= number <= 2.0**53 else None


def _time(row: dict[str, Any]) -> float | None:
    return number_or_none(row.get("time"))


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"
