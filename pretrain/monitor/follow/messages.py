"""Messages about a run, made from the rows of events.jsonl and restarts.jsonl: short, for a telephone."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.errors import FINISHED, GUARD, INTERRUPTED, REJECTED, STOPPED, shorten

_LONGEST_REASON = 300  # characters
# event -> kind of message
_KIND_OF_EVENT = {"stop": "end", "spike": "spike", "rollback": "rollback", "hang": "hang", "off_curve": "off_curve",
                  "slow_rank": "slow_rank", "slow_rank_over": "slow_rank", "corruption": "corruption",
                  "recomputation": "corruption", "save_failed": "save_failed", "after_save_failed": "save_failed"}
# kind -> what to do; {run}: the run folder
_ADVICE = {
    "end": "Next: ds-pretrain summary {run}",
    "crash": "The end of the log has the cause. The same command continues from the newest checkpoint.",
    "hang": "Stacks of all ranks are in {run}/hangs. Only the supervisor starts the run again by itself.",
    "no_progress": "Look at the log and at the hosts: ranks may be stopped, a store or a disk may not answer.",
    "spike": "Look whether the loss falls back: ds-pretrain summary {run}",
    "rollback": "The run skips these samples and continues. Nothing to do, unless it repeats.",
    "off_curve": "Likely causes: {run}/events.jsonl and ds-pretrain report {run}",
    "slow_rank": "Look for other programs, throttling, a slow disk or link on the host: ds-pretrain doctor",
    "corruption": "A device or its memory may be faulty. Check the host before you trust later checkpoints.",
    "save_failed": "Earlier checkpoints are unchanged. Look for free space and permissions.",
}
_SEVERITY = {"crash": "failure", "hang": "failure", "no_progress": "failure", "corruption": "failure",
             "save_failed": "failure", "spike": "warning", "rollback": "warning", "off_curve": "warning",
             "slow_rank": "warning"}


@dataclass(frozen=True)
class Message:
    """A message for people."""

    kind: str  # one of NOTIFY_KINDS
    run: Path
    headline: str
    lines: tuple[str, ...] = ()
    step: int = 0

    @property
    def title(self) -> str:
        return f"{self.run.name}: {self.headline}"

    @property
    def body(self) -> str:
        """The lines, then what to do."""
        advice = _ADVICE.get(self.kind, "").format(run=self.run)
        return "\n".join(line for line in (*self.lines, advice) if line)

    @property
    def severity(self) -> str:
        """The type of notification that apprise knows."""
        return _SEVERITY.get(self.kind, "info")

    def as_group(self, count: int, minutes: float) -> "Message":
        """Return the message that stands for `count` messages of this kind, of which this is the last one."""
        return replace(self, headline=f"{count} more {self.kind} in {minutes:.0f} minutes", lines=(
            f"The last: {self.headline}", *self.lines))


@dataclass
class RunFacts:
    """What messages repeat about the run: of the newest record of run.json, and the newest training row."""

    run: Path
    host: str = ""  # of rank 0
    train_steps: int | None = None
    row: dict[str, Any] | None = None

    def message(self, kind: str, headline: str, reason: object = "", *, step: int | None = None) -> Message:
        """Return a message with the position of the run. `step`: of the event; without one, the newest step."""
        row = self.row or {}
        at = row.get("step", 0) if step is None else step
        total = f"/{self.train_steps}" if self.train_steps else ""
        loss = row.get("loss")
        facts = [f"step {at}{total}", f"loss {loss:.4f}" if isinstance(loss, float) else "",
                 f"host {self.host}" if self.host else ""]
        return Message(kind, self.run, headline, (shorten(str(reason or ""), _LONGEST_REASON),
                                                  ", ".join(fact for fact in facts if fact)), step=at)


def message_of_event(row: dict[str, Any], facts: RunFacts, *, supervised: bool) -> Message | None:
    """Return the message about a row of events.jsonl; None if there is none.

    `supervised`: rows of restarts.jsonl tell how starts end.
    """
    event, step, reason = row["event"], row.get("step", 0), row.get("reason", "")
    if event == "start":
        ranks = row.get("world_size")
        return facts.message("restart" if step else "start", f"trains again from step {step}" if step else "trains",
                             f"{ranks} ranks" if ranks else "", step=step)
    kind = _KIND_OF_EVENT.get(event)
    if kind is None or (event == "stop" and supervised) or (row.get("finding") == "off"):
        return None
    headline = {"stop": "stopped" if reason != "finished" else "finished", "spike": f"spike at step {step}",
                "rollback": f"rolled back to step {row.get('to_step')}", "hang": f"hang at step {step}",
                "off_curve": f"loss off its curve at step {step}", "slow_rank": _slow(row),
                "slow_rank_over": _slow(row, "is as fast as the others again")}.get(
                    event, f"{kind.replace('_', ' ')} at step {step}")
    return facts.message(kind, headline, "" if reason == "finished" else reason, step=step)


def _slow(row: dict[str, Any], what: str = "is slow") -> str:
    ranks = ", ".join(map(str, row.get("ranks") or ())) or "?"
    hosts = ", ".join(dict.fromkeys(map(str, row.get("hosts") or ())))
    return f"rank {ranks}{f' on {hosts}' if hosts else ''} {what}"


def message_of_restart(row: dict[str, Any], facts: RunFacts) -> Message | None:
    """Return the message about a row of restarts.jsonl: a start that ended in a crash, or the end of the supervision.

    A hang has been reported by its event, and starts that are not followed by another one by the summary.
    """
    if "summary" in row:
        return facts.message("end", "finished" if row["summary"] == "finished" else "the supervisor ended",
                             f"{row['summary']}; {row.get('starts')} starts, goodput {row.get('goodput', 0):.1%}",
                             step=row.get("last_step"))
    reason = str(row.get("reason", ""))
    if row.get("exit_code") in (FINISHED, REJECTED, STOPPED, GUARD) or reason.startswith("hang: "):
        return None
    return facts.message("crash", f"start {row.get('start')} ended", f"{reason}; newest checkpoint: step "
                         f"{row.get('kept_step')}", step=row.get("last_step"))


def message_of_end(report: dict[str, Any] | None, owner: str, facts: RunFacts) -> Message:
    """Return the message about a run that ended without the event "stop". `report`: what its owner said, if it could.
    """
    if report is None:
        return facts.message("crash", f"{owner} has ended", f"The process of {owner} was killed, or ran out of memory"
                             + ("; the run may continue, but nobody restarts it" if owner == "the supervisor" else ""))
    code = report.get("exit_code")
    is_crash = code not in (FINISHED, REJECTED, STOPPED, GUARD, INTERRUPTED)
    reason = ", ".join(filter(None, [str(report.get("reason", "")), "" if code is None else f"exit code {code}"]))
    return facts.message("crash" if is_crash else "end", "crashed" if is_crash else "ended", reason)
