"""The data of an earlier run, and the data position of a step, from the record of the run. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.data_spec import planned_samples, recorded_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.token_schedules import BatchSizes, recorded_batch_sizes
from pretrain.errors import ConfigError
from pretrain.hub import recorded_tokenizer
from pretrain.model.config import model_config_from
from pretrain.monitor.read_run_folder import newest_path, read_events, read_metrics, read_starts

OTHER_DATA = "its training data has changed since the step was trained"
_MOST_UNLOGGED = 1_000_000  # steps between two rows: a larger distance comes from a damaged row


def open_recorded_data(start: dict[str, Any], *, seq_length: int, vocab_size: int,
                       tokenizer: str | None = None) -> RunData:
    """Open the data of a start of a run. Raises ConfigError for files that are missing, damaged or do not fit.

    The caller compares the fingerprints of the datasets with the recorded ones, where this matters.
    """
    flags = start["flags"]
    return open_run_data(recorded_data_spec(flags), seq_length=seq_length, seed=flags.get("seed", 0),
                         tokenizer=tokenizer, vocab_size=vocab_size,
                         num_samples=_planned_samples(start))


def _planned_samples(start: dict[str, Any]) -> dict[str, int] | None:
    """Return the samples that the run was planned to read; None if its record does not have all numbers."""
    flags, batch = start["flags"], start.get("batch", {})
    numbers = {"train_steps": start.get("train_steps"), "eval_interval": flags.get("eval_interval"),
               "eval_steps": flags.get("eval_steps"), "global_batch_size": batch.get("global_batch_size"),
               "first_sample": flags.get("first_sample") or 0}
    if not all(isinstance(value, int) and value >= (name == "global_batch_size") for name, value in numbers.items()):
        return None
    batch_sizes = recorded_batch_sizes(start)
    first_sample, steps = numbers["first_sample"], numbers["train_steps"]
    samples = batch_sizes.samples_after(steps, first_sample=first_sample) - first_sample
    return planned_samples(**numbers, train_samples=samples, order_samples=flags.get("order_samples"))


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


def open_data_of_step(run: Path, start: dict[str, Any]) -> RunData:
    """Open the data of a start of a run. Raises ConfigError if the training data has changed since."""
    flags = start.get("flags", {})
    if flags.get("seq_length") is None or "model_config" not in start:
        raise ConfigError(f"{run}: run.json", problem="the record of the run's data or model is damaged")
    model = model_config_from(start["model_config"], f"{run}: run.json: model_config")
    data = open_recorded_data(start, seq_length=flags["seq_length"], vocab_size=model.vocab_size,
                              tokenizer=flags.get("tokenizer") and recorded_tokenizer(flags["tokenizer"]))
    if start.get("data", {}).get("train") != data.datasets["train"].fingerprint:
        raise ConfigError(str(run), problem=OTHER_DATA,
                          remedy="restore the data")
    return data
