"""Progress of a run during one start, read from the run folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import newest_step
from pretrain.monitor.read_run_folder import is_number, read_events, read_metrics

_FILES = ("events.jsonl", "metrics.jsonl")


@dataclass(frozen=True)
class RunProgress:
    """Rows that one start has added to the run folder, and the step before and after the start."""

    events: list[dict[str, Any]]  # rows of events.jsonl
    steps: list[dict[str, Any]]  # training rows of metrics.jsonl
    first_step: int  # step from which this start resumed; its first training step is the next one
    kept_step: int  # step of the newest good checkpoint

    @property
    def last_step(self) -> int:
        """The last step that was logged or saved."""
        return max([self.first_step, self.kept_step, *(row["step"] for row in self.steps)])

    @property
    def began(self) -> bool:
        """True if this start has reached training: the event "start" is written when all ranks have connected."""
        return any(event["event"] == "start" for event in self.events)

    @property
    def hang(self) -> dict[str, Any] | None:
        """The event "hang", which the watchdog writes before it ends the ranks, or None."""
        return next((event for event in reversed(self.events) if event["event"] == "hang"), None)

    @property
    def stop(self) -> dict[str, Any] | None:
        """The event "stop", which a run writes when it ends without an error, or None."""
        return next((event for event in reversed(self.events) if event["event"] == "stop"), None)


def file_sizes(run: Path) -> dict[str, int]:
    """Return file name -> size in bytes. A start appends its rows after these bytes."""
    return {name: (run / name).stat().st_size if (run / name).is_file() else 0 for name in _FILES}


def read_progress(run: Path, sizes_before: Mapping[str, int]) -> RunProgress:
    """Read the rows that a start has appended. `sizes_before`: result of `file_sizes` before the start."""
    events, metrics = read_events(run, sizes_before[_FILES[0]]), read_metrics(run, sizes_before[_FILES[1]])
    kept_step = newest_step(run / "checkpoints")
    first_step = next((event["step"] for event in events if event["event"] == "start"), kept_step)
    return RunProgress(events, [row for row in metrics if is_number(row.get("step_time_ms"))], first_step, kept_step)


def kept_step_seconds(progress: RunProgress) -> dict[int, float]:
    """Return step -> seconds for the steps up to the newest checkpoint. The next start repeats all later steps.

    A row of metrics.jsonl has the mean time of the steps since the previous row. Steps after the last row are assumed
    to take the same time as that row.
    """
    seconds: dict[int, float] = {}
    done, last = progress.first_step, 0.0
    for row in progress.steps:
        last = row["step_time_ms"] / 1e3
        seconds.update(dict.fromkeys(range(min(done + 1, row["step"]), min(row["step"], progress.kept_step) + 1), last))
        done = row["step"]
    if last:
        seconds.update(dict.fromkeys(range(done + 1, progress.kept_step + 1), last))
    return {step: value for step, value in seconds.items() if step <= progress.kept_step}
