"""Results of an evaluation as a table and as JSON. Imports no torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.checkpoint.format.files import write_atomically
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from pretrain.analysis.evaluate.evaluate import Result


@dataclass(frozen=True)
class Setting:
    """Source and settings of an evaluation. The field names are the keys of --json."""

    model: str  # folder of the checkpoint or transformers model
    parameters: int
    dtype: str
    device: str
    ranks: int
    partitioned_weights: bool


def table_lines(setting: Setting, results: "Sequence[Result]", tasks: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines that the tool prints."""
    ranks = f"{setting.ranks} rank{'s' * (setting.ranks > 1)}"
    weights = ", weights partitioned by ZeRO-3" if setting.partitioned_weights else ""
    lines = [f"{setting.model}: {setting.parameters / 1e6:,.1f} M parameters; {setting.device}, {setting.dtype}, "
             f"{ranks}{weights}"]
    if results:
        head = ("data", "loss", "std. error", "perplexity", "bits/byte", "tokens", "bytes")
        rows = [(result.data, f"{result.loss:.4f}", _text(result.standard_error, ".4f"),
                 f"{result.perplexity:,.2f}" if result.perplexity < 1e9 else f"{result.perplexity:.3e}",
                 _text(result.bits_per_byte, ".4f"), f"{result.tokens:,}", _text(result.bytes, ","))
                for result in results]
        lines += _aligned([head, *rows])
    if tasks:
        scores = [(name, metric, f"{value:.4f}", _text(scores.get(f"{metric}_stderr"), ".4f"))
                  for name, scores in tasks.items() for metric, value in scores.items()
                  if not metric.endswith("_stderr")]
        lines += _aligned([("task", "metric", "value", "std. error"), *scores], num_words=2)
    return lines


def _text(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _aligned(rows: Sequence[Sequence[str]], num_words: int = 1) -> list[str]:
    """Align columns: the first `num_words` to the left, the numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if column < num_words else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def write_json(path: Path, setting: Setting, results: "Sequence[Result]", tasks: dict[str, dict[str, Any]]) -> None:
    """Write all results into one JSON file, atomically. Values that JSON does not have (NaN, infinity) become null."""
    values = {**asdict(setting), "data": [asdict(result) for result in results], "tasks": tasks}
    try:
        write_atomically(path, json.dumps(_finite(values), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}", problem=f"the file cannot be written: {error.strerror}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
