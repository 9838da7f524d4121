"""The ladder.json of a run: see tests/extensions/test_deletable.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import check_run
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.distributed.device import cpu_device
from pretrain.extensions.ladder.expected_curve import FORMAT, counted_parameters
from pretrain.model.description import ModelConfig


def ladder_of(model: ModelConfig, corpus: Path, *, tokens_per_step: float = 64.0) -> dict[str, Any]:
    """Return what a run of 50 steps reads of a ladder.json."""
    curve = [{"tokens": tokens_per_step * steps, "loss": 4.0, "low": 3.9, "high": 4.1} for steps in (10, 50)]
    target = {"parameters": counted_parameters(model), "tokens": 50 * tokens_per_step,
              "tokens_per_step": tokens_per_step, "loss": 4.0, "low": 3.9, "high": 4.1, "curve": curve}
    return {"format": FORMAT, "corpus": {"train": IndexedDataset(corpus).fingerprint}, "vocab_size": model.vocab_size,
            "family": model.architecture, "scaling": "standard", "target": target}


def write_files(folder: Path, words: Sequence[str]) -> None:
    """Write ladder.json for the run with these flags."""
    plan = check_run(parse_arguments(list(words)), world_size=1, device=cpu_device())
    (folder / "ladder.json").write_text(json.dumps(ladder_of(
        plan.model, Path(plan.args.train_data[0]), tokens_per_step=plan.layout.tokens_per_step)))
