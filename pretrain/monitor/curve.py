"""The rows of a run as columns, what run.json says about the run, and what extensions find in both and expect."""

import contextlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.active_extensions import functions
from pretrain.errors import ConfigError
from pretrain.monitor.noise import NORMAL_MAD
from pretrain.monitor.read_run_folder import newest_start, read_metrics

KEYS = ("step", "seq_length", "consumed_samples", "skipped_steps", "loss", "lr", "grad_norm", "clip_norm", "clip_rate",
        "update_ratio", "step_time_ms", "data_time_ms", "forward_time_ms", "backward_time_ms", "mfu_exact")
EVALUATION_KEYS = ("step", "eval_loss", "mean_of_sets")


@dataclass(frozen=True)
class Facts:
    """Facts about a run from run.json. None, or the default: it is not known."""

    train_steps: int | None = None
    vocab_size: int | None = None
    unigram_entropy: float | None = None  # nats per token, of the training data
    samples_per_epoch: int | None = None  # one pass over the training data
    schedule: Mapping[str, Any] | None = None  # fields of `Schedule`; None: the JSON has its own scheduler
    peak_lr: float | None = None
    is_new: bool = False  # the run began with random weights
    has_adam: bool = False  # the optimizer is Adam or AdamW
    label_smoothing: bool = False  # or another --loss: the training loss is not the cross-entropy
    mixes_data: bool = False  # --blend_schedule: the data, and with it the loss, changes while the run trains
    eval_steps: int = 1  # global batches of an evaluation
    blocks: float | None = None  # that one device computes in a step: of its pipeline stage, times micro-batches

    @classmethod
    def of_record(cls, start: Mapping[str, Any]) -> "Facts":
        """Return the facts in a record of run.json, which `read_starts` has checked."""
        flags, model, batch, schedule = (start.get(key) or {} for key in ("flags", "model_config", "batch", "schedule"))
        layers = next((model[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in model), None)
        micro_batches = batch.get("gradient_accumulation_steps")
        stages = (start.get("layout") or {}).get("pipeline_stages", 1)
        optimizer = (start.get("deepspeed_config") or {}).get("optimizer")
        optimizer = optimizer if isinstance(optimizer, dict) else {}
        peak = schedule.get("peak") or (optimizer.get("params") or {}).get("lr")
        vocab_size = model.get("vocab_size")
        sizes = [value for value in (layers, micro_batches, stages) if isinstance(value, int) and value > 0]
        return cls(start.get("train_steps"), vocab_size if isinstance(vocab_size, int) and vocab_size > 1 else None,
                   start.get("unigram_entropy"), start.get("samples_per_epoch"), schedule or None,
                   peak if isinstance(peak, float) and peak > 0 else None,
                   is_new="first_step" in start and not start.get("origin") and not start.get("lineage"),
                   has_adam=str(optimizer.get("type")).lower().endswith(("adam", "adamw")),
                   label_smoothing=bool(flags.get("label_smoothing") or flags.get("loss")),
                   mixes_data=bool(flags.get("blend_schedule")),
                   eval_steps=max(flags.get("eval_steps") or 1, 1),
                   blocks=sizes[0] * sizes[1] / sizes[2] if len(sizes) == 3 else None)

    @property
    def log_v(self) -> float:
        """Loss of equal probabilities, ln(V); NaN if it is not known."""
        return math.log(self.vocab_size) if self.vocab_size else math.nan

    def peak(self, rates: np.ndarray) -> float:
        """Return the peak learning rate: the planned one, or the highest of those that were logged."""
        return self.peak_lr or float(np.nanmax(rates, initial=0.0))


class Rows:
    """A growing table of float64 columns. A value that is missing, null or not a number is NaN."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys, self._values = keys, array("d")

    def __len__(self) -> int:
        return len(self._values) // len(self._keys)

    def drop_after(self, step: int) -> None:
        """Remove the rows of later steps, because the run has returned to `step`."""
        while len(self) and self._values[-len(self._keys)] > step:
            del self._values[-len(self._keys):]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, in place of the rows of the same and later steps."""
        self.drop_after(row["step"] - 1)
        for key in self._keys:
            value = row.get(key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
            self._values.append(float(value) if is_number else math.nan)  # type: ignore[arg-type]

    def columns(self, newest: int | None = None) -> dict[str, np.ndarray]:
        """Return a copy of the columns, or of their newest rows."""
        values = self._values if newest is None else self._values[-newest * len(self._keys):]
        table = np.array(values, dtype=np.float64).reshape(-1, len(self._keys))
        return dict(zip(self._keys, table.T, strict=True))


@dataclass(frozen=True)
class Curve:
    """The newest rows of all steps: training rows with KEYS, and evaluations on "valid" with EVALUATION_KEYS."""

    rows: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]

    def __getitem__(self, key: str) -> np.ndarray:
        return self.rows[key]

    def part(self, selected: slice | np.ndarray) -> "Curve":
        """Return the curve with some of the training rows."""
        return Curve({key: column[selected] for key, column in self.rows.items()}, self.evaluations)

    @property
    def num_rows(self) -> int:
        return len(self.rows["step"])

    @property
    def steps(self) -> float:
        """Number of the last logged step."""
        return float(self["step"][-1])

    @cached_property
    def settled(self) -> "Curve":
        """The rows with a finite loss from the last rise of the learning rate on, with the present sequence length.

        The end of the warm-up is the last rise, also if there is a second warm-up. A rate that follows the batch size
        may rise later.
        """
        rate, length = self["lr"], self["seq_length"]
        rises = np.flatnonzero(np.diff(rate) > 1e-6 * np.nanmax(rate, initial=0.0))
        changes = np.flatnonzero(np.diff(length) != 0) if np.all(np.isfinite(length)) else rises
        first = max([int(part[-1]) + 1 for part in (rises, changes) if len(part)], default=0)
        kept = np.isfinite(self["loss"])
        kept[:first] = False
        return self.part(kept)

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the loss of one step's batch around the curve.

        It is estimated from second differences, which neither a trend nor slow fluctuations enter.
        """
        return float(np.median(np.abs(np.diff(self["loss"], 2)))) / NORMAL_MAD / math.sqrt(6)


class CurveLog:
    """The curve of a run that trains, row by row. Exists on rank 0 only.

    Args:
        run: the run folder, whose earlier rows count if the run is resumed.
        first_step: number of steps that were done before.
    """

    def __init__(self, run: Path, *, first_step: int) -> None:
        self._run, self._rows, self._evaluations = run, Rows(KEYS), Rows(EVALUATION_KEYS)
        self._facts: Facts | None = None  # run.json is not yet written
        if first_step:
            for row in read_metrics(run):
                self.add(row)
            self.return_to(first_step)

    def __len__(self) -> int:
        return len(self._rows)

    def return_to(self, step: int) -> None:
        """Forget the rows of later steps, because the run has returned to `step`."""
        self._rows.drop_after(step)
        self._evaluations.drop_after(step)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of training or of an evaluation."""
        if "loss" in row:
            self._rows.append(row)
            self._evaluations.drop_after(int(row["step"]) - 1)
        elif row.get("split") == "valid":
            self._evaluations.append(row)

    def curve(self) -> Curve:
        """Return the rows until now."""
        return Curve(self._rows.columns(), self._evaluations.columns())

    def facts(self) -> Facts:
        """Return what run.json says about the run."""
        if self._facts is None:
            self._facts = Facts()
            with contextlib.suppress(ConfigError):  # the disk was full
                self._facts = Facts.of_record(newest_start(self._run))
        return self._facts


@dataclass(frozen=True)
class Hint:
    """A fault that the curve shows: its name, what is seen, with numbers, and what to do."""

    name: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def hints_of_extensions(curve: Curve, facts: Facts) -> list[Hint]:
    """Return what the extensions find in a curve: the hints of each, the most important first."""
    return [hint for _, find in functions("hints") for hint in find(curve, facts)]


@dataclass(frozen=True)
class Expected:
    """An expected loss in nats a token, and the interval of it."""

    loss: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.loss:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class Expectation:
    """The expected losses of a run."""

    at: Callable[[float], Expected | None]  # by the number of tokens that the run was trained with; None: not known
    remark: str = ""  # how the run does, for a line of text


def expectation_of(start: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Expectation | None:
    """Return what the first extension expects that knows this run.

    Args:
        start: newest record of run.json; its values are not checked.
        events: rows of events.jsonl.
    """
    return next((found for _, expect in functions("expectation") if (found := expect(start, events)) is not None), None)


def millions_of_tokens(tokens: float) -> str:
    """Return a number of tokens with its unit, in millions if there are that many."""
    return f"{tokens / 1e6:,.4g} M tokens" if tokens >= 1e6 else f"{tokens:,.0f} tokens"
