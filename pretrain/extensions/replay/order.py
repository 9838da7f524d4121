"""The order for the ranks of a replay: a JSON file that `ds-pretrain replay` writes. Imports no torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pretrain.errors import ConfigError, reason_of
from pretrain.stored_json import build, read_json

SAMPLES_FILE = "samples.json"  # in the run folder of the replay: SampleReport


@dataclass(frozen=True)
class ReplayOrder:
    """What a replay trains. It ends after `step`, and neither evaluates nor saves."""

    step: int
    consumed_samples: int | None = None  # data position of its first step; None: that of the checkpoint
    vetoed: list[int] = field(default_factory=list)  # steps whose update the run skipped because of a spike
    cross_check: bool = False  # a micro-batch of each data-parallel rank is computed on the next one, too
    # examine the samples of `step`, and train it and so many steps after it with and without the odd ones; None: no
    steps_after: int | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_order(path: Path) -> ReplayOrder:
    """Read the file. Raises ConfigError."""
    try:
        return build(ReplayOrder, read_json(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--replay {path}", problem=f"it cannot be read ({reason_of(error)})",
                          remedy="`ds-pretrain replay` writes this file, and gives this flag itself") from None
