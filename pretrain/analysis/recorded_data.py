"""Open the data of an earlier run as its record in run.json describes it. Imports no torch."""

from typing import Any

from pretrain.data.data_spec import planned_samples, recorded_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.token_schedules import recorded_batch_sizes


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
