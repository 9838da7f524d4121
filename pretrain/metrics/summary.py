"""A run in a few lines: where it stands, its losses, and what it had to beat."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.data.indexed import read_meta
from pretrain.metrics.rows import read_metrics, read_starts


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
    """Read from run.json and metrics.jsonl. Raises ConfigError for what is no run folder."""
    start, rows = read_starts(run)[-1], read_metrics(run)
    training = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if row.get("split") == "valid"]
    last = training[-1] if training else {}
    meta = read_meta(start["flags"]["valid_data"] or start["flags"]["train_data"]) or {}
    return Summary(step=last.get("step", 0), train_steps=start["train_steps"], loss=last.get("loss"),
                   valid_loss=evaluations[-1]["eval_loss"] if evaluations else None,
                   unigram_entropy=meta.get("entropy_nats"), tokens_per_second=last.get("tokens_per_second"))
