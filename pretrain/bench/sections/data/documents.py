"""Speed of a training step with --document_attention, next to the same step without it."""

from functools import partial

import numpy as np
import torch

from pretrain.bench.sections.data.figures import DataBench, DataFigure, least_cpu_seconds
from pretrain.data.loader import document_positions
from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module

_EOD = 0
_MODEL = "pythia-31m"  # preset
_SAMPLES = 1
_MEAN_TOKENS = {"short documents": 100, "usual documents": 500, "documents longer than a sample": 10**6}


def documents(bench: DataBench) -> list[DataFigure]:
    """Compare forward and backward passes in bf16 over packed samples."""
    config = load_model_config(_MODEL, "vocab_size=8192")
    module = as_module(config)
    initialize_parameters(module, config, seed=1)
    module.bfloat16()
    length = max(16, round(config.max_positions * bench.scale))
    tokens_BT = torch.randint(1, config.vocab_size, (_SAMPLES, length))
    weights_BT = torch.full(tokens_BT.shape, 1 / tokens_BT.numel())

    def step(positions_BT: torch.Tensor | None) -> None:
        module(tokens_BT, tokens_BT, weights_BT, positions_BT).backward()
        module.zero_grad()

    positions = (None, *(_positions(length, mean) for mean in _MEAN_TOKENS.values()))
    baseline, *seconds = least_cpu_seconds([partial(step, each) for each in positions], bench.repetitions)
    short, usual, _ = _MEAN_TOKENS.values()
    note = f"Document attention: forward and backward pass of the preset {_MODEL} (vocabulary 8,192) in bf16, " \
           f"samples of {length} tokens; on average, short documents have {short} tokens, and usual ones {usual}."
    return [DataFigure(f"--document_attention, {name}", tokens_BT.numel() / own, tokens_BT.numel() / baseline,
                       "tokens/s", "without it", note=note)
            for name, own in zip(_MEAN_TOKENS, seconds, strict=True)]


def _positions(length: int, mean: int) -> torch.Tensor:
    """Return the positions [samples, length] of documents whose lengths are distributed geometrically."""
    ends = np.random.default_rng(0).random((_SAMPLES, length)) < 1 / mean
    return torch.from_numpy(document_positions(np.where(ends, _EOD, 1), _EOD))
