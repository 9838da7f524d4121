"""State of a run as its follower knows it, and the messages about it: short, for a telephone."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import FINISHED, GUARD, INTERRUPTED, REJECTED, STOPPED, counted, shorten
from pretrain.extensions.notify.extension import KINDS
from pretrain.monitor.rows import EVENTS
from pretrain.stored_json import read_json

_LONGEST_REASON = 300  # characters
# event -> kind of its message, if they have different names
_KIND_OF_EVENT = {"stop": "end", "slow_rank_over": "slow_rank", "recomputation": "corruption",
                  "after_save_failed": "save_failed"}
_FAILURES = ("crash", "hang", "no_progress", "corruption", "save_failed")
_NO_CRASH = (FINISHED, REJECTED, STOPPED, GUARD, INTERRUPTED)
_LAYOUT = ("world_size", "zero_stage", "precision")


@dataclass(frozen=True)
class Message:
    """A message for people."""

    kind: str  # one of KINDS
    run: Path
    headline: str
    lines: tuple[str, ...] = ()
    step: int = 0

    @property
    def title(self) -> str:
        return f"{self.run.name}: {self.headline}"

    @property
    def body(self) -> str:
        """The lines, then the command that says what to do."""
        return "\n".join([*self.lines, f"What to do: ds-pretrain summary {self.run}"] if self.severity != "info" else
                         self.lines)

    @property
    def severity(self) -> str:
        """The type of notification that apprise knows."""
        if self.kind in _FAILURES:
            return "failure"
        return "info" if self.kind in ("start", "restart", "end") else "warning"


@dataclass
class RunState:
    """State of the run as its follower knows it. Values are replaced and never changed, so that threads may read."""

    run: Path
    row: dict[str, Any] = field(default_factory=dict)  # newest training row
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # split -> newest row
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))  # since the follower started
    train_steps: int | None = None
    info: dict[str, str] = field(default_factory=dict)  # values of the newest record of run.json

    def see_row(self, row: dict[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        if "split" in row:
            self.evaluations = {**self.evaluations, str(row["split"]): row}
        elif "loss" in row:
            self.row = row

    def read_record(self) -> None:
        """Read the newest record of run.json, if there is one."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = read_json(self.run / "run.json")[-1]
            self.train_steps = int(record["train_steps"])
            self.info = {"run": self.run.name, "folder": str(self.run), "host": str(record["hardware"][0]["host"]),
                         "model": str(record["flags"]["model"]),
                         **{key: str(record["layout"][key]) for key in _LAYOUT}}

    def message(self, kind: str, headline: str, reason: object = "", *, step: int | None = None) -> Message:
        """Return a message with the position of the run. `step`: of the event; without one, the newest step."""
        at, loss, host = self.row.get("step", 0) if step is None else step, self.row.get("loss"), self.info.get("host")
        facts = [f"step {at}/{self.train_steps}" if self.train_steps else f"step {at}",
                 f"loss {loss:.4f}" if isinstance(loss, float) else "", f"host {host}" if host else ""]
        lines = shorten(str(reason or ""), _LONGEST_REASON), ", ".join(filter(None, facts))
        return Message(kind, self.run, headline, tuple(filter(None, lines)), step=at)

    def message_of_event(self, row: dict[str, Any]) -> Message | None:
        """Return the message about a row of events.jsonl; None if there is none."""
        event, step, reason = row["event"], row.get("step", 0), row.get("reason", "")
        if event == "start":
            again = step > 0 or self.events["start"] > 1
            kind, headline = ("restart", f"trains again from step {step}") if again else ("start", "trains")
            return self.message(kind, headline, f"{row.get('world_size')} ranks", step=step)
        kind = _KIND_OF_EVENT.get(event, event)
        if kind not in KINDS or row.get("finding") == "off":
            return None
        if kind == "end":
            finished = reason == "finished"
            return self.message(kind, "finished" if finished else "stopped", "" if finished else reason, step=step)
        what = f"rolled back to step {row.get('to_step')}" if event == "rollback" else \
            f"{event if event.startswith(kind) else kind} at step {step}"
        return self.message(kind, what.replace("_", " "), reason, step=step)

    def message_of_restart(self, row: dict[str, Any]) -> Message | None:
        """Return the message about a row of restarts.jsonl: a start that crashed, or the end of the supervision.

        A hang has been reported by its event, and starts that are not followed by another one by the summary.
        """
        if "summary" in row:
            return self.message("end", "finished" if row["summary"] == "finished" else "the supervisor ended",
                                f"{row['summary']}; {counted(row.get('starts', 0), 'start')}, goodput "
                                f"{row.get('goodput', 0):.1%}",
                                step=row.get("last_step"))
        reason = str(row.get("reason", ""))
        if row.get("exit_code") in _NO_CRASH or reason.startswith("hang: "):
            return None
        return self.message("crash", f"start {row.get('start')} ended", f"{reason}; newest checkpoint: step "
                            f"{row.get('kept_step')}", step=row.get("last_step"))

    def message_of_end(self, report: dict[str, Any] | None, owner: str) -> Message:
        """Return the message about a run that ended without the event "stop". `report`: of its owner, if it could."""
        if report is None:
            return self.message("crash", f"{owner} has ended", f"{owner} was killed, or ran out of memory; if its "
                                "processes still train, nobody watches them")
        crashed, code = report["exit_code"] not in _NO_CRASH, report["exit_code"]
        return self.message("crash" if crashed else "end", "crashed" if crashed else "ended",
                            report["reason"] or f"exit code {code}")
