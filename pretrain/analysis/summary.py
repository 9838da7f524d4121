"""A run in a few lines: where it stands, its losses, and what it had to beat."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.indexed import read_meta
from pretrain.errors import ConfigError
from pretrain.monitor.rows import newest_start, read_metrics


@dataclass(frozen=True)
class Summary:
    """Losses in nats a token; None where the run has not got so far or the data has no .meta.json."""

    step: int
    train_steps: int
    loss: float | None
    valid_loss: float | None
    unigram_entropy: float | None  # of the validation tokens: what guessing by frequency alone would cost
    tokens_per_second: float | None

    @property
    def below_unigram_entropy(self) -> bool:
        """Whether the model has learned more than how frequent each token is."""
        return None not in (self.valid_loss, self.unigram_entropy) and self.valid_loss < self.unigram_entropy  # type: ignore[operator]


def summarize(run: Path) -> Summary:
    """Read from run.json and metrics.jsonl. Raises ConfigError for what is no run folder, and for damaged rows."""
    start, rows = newest_start(run), read_metrics(run)
    training = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if row.get("split") == "valid"]
    last, evaluation = training[-1] if training else {}, evaluations[-1] if evaluations else {}
    flags, metrics = start["flags"], run / "metrics.jsonl"
    data = flags.get("valid_data") or flags.get("train_data")
    meta = read_meta(data) or {} if isinstance(data, str) else {}
    return Summary(step=int(_number(metrics, last, "step") or 0),
                   train_steps=int(_number(run / "run.json", start, "train_steps") or 0),
                   loss=_number(metrics, last, "loss"), valid_loss=_number(metrics, evaluation, "eval_loss"),
                   unigram_entropy=_number(Path(f"{data}.meta.json"), meta, "entropy_nats"),
                   tokens_per_second=_number(metrics, last, "tokens_per_second"))


def _number(path: Path, row: dict[str, Any], key: str) -> float | None:
    """A row's value; None where it has none. Raises ConfigError for what is no finite number."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{path}: {key}", found=json.dumps(value), expected="a number", remedy="the row is damaged")
    return value
