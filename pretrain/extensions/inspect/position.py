"""The data position of a step, from the files of the run. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.token_schedules import BatchSizes, recorded_batch_sizes
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import newest_path, read_events, read_metrics, read_starts

_MOST_UNLOGGED = 1_000_000  # steps between two rows: a larger distance comes from a damaged row


@dataclass(frozen=True)
class StepPosition:
    """The start of the run that trained a step, and the data position at the beginning of the step."""

    start: dict[str, Any]  # of run.json
    step: int
    consumed_samples: int


def find_step(run: Path, step: int) -> StepPosition:
    """Find the data position of a step, from 1. Raises ConfigError if the run has not trained this step.

    If a step was trained several times, because of a resume or a rollback, the last time counts.
    """
    starts = _starts_with_steps(run)
    trained = [start for first, start in starts if first < step]
    rows = [row for row in newest_path([row for row in read_metrics(run) if "loss" in row])
            if isinstance(row.get("consumed_samples"), int)]
    last = rows[-1]["step"] if rows else 0
    first = 1 + min(first for first, _ in starts)  # a branch begins after step 0
    if not first <= step <= last:
        raise ConfigError(f"STEP {step}", problem=f"{run} has logged the steps {first} to {last}" if last else
                          f"{run} has logged no step", remedy="give a step that the run has trained")
    # the next logged step: the steps between two logged steps follow one another
    following = next(row for row in rows if row["step"] >= step)
    if following["step"] - step > _MOST_UNLOGGED:
        raise ConfigError(str(run / "metrics.jsonl"), problem=f"it has no row of the {_MOST_UNLOGGED:,} steps from "
                          f"{step} on", remedy="give a step that the run has logged")
    position: int = following["consumed_samples"]
    for number in range(following["step"], step - 1, -1):  # a resume may have changed the batch size
        position -= _batch_sizes(run, [start for first, start in starts if first < number][-1]).ending_at(position)
    return StepPosition(trained[-1], step, position)


def _batch_sizes(run: Path, start: dict[str, Any]) -> BatchSizes:
    try:
        return recorded_batch_sizes(start)
    except (KeyError, TypeError, ValueError):  # ConfigError is a ValueError
        raise ConfigError(f"{run}: run.json", problem="the record of the run's batch size is damaged") from None


def _starts_with_steps(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the starts of the run that trained, each with the number of steps that were done before."""
    steps = [row["step"] for row in read_events(run) if row["event"] == "start"]
    found = list(zip(steps, read_starts(run), strict=False))
    if not found:
        raise ConfigError(str(run), problem="events.jsonl and run.json have no record of a start")
    return found
