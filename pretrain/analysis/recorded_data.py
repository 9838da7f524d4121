"""The data of an earlier run, from its record. Imports no torch."""

from pathlib import Path
from typing import Any

from pretrain.data.data_spec import planned_samples, recorded_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.token_schedules import recorded_batch_sizes
from pretrain.errors import ConfigError
from pretrain.hub import recorded_tokenizer
from pretrain.model.config import model_config_from

OTHER_DATA = "its training data has changed since the step was trained"


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
