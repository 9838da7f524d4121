"""A dataset of "the user's own code" for tests: sentences of counting tokens, with weights that are not 1.

The tests copy this file into their folder as own_data.py, and name it by --dataset_module own_data:build.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": lambda tokens: {}["text"], "text": lambda tokens: "words", "floats": lambda tokens: tokens / 2,
    "matrix": lambda tokens: tokens[None], "one": lambda tokens: tokens[:1],
    "long": lambda tokens: np.resize(tokens, 99),
    "large": lambda tokens: tokens * 1000, "negative": lambda tokens: -1 - tokens,
    "key": lambda tokens: {"tokens": tokens, "weight": tokens}, "no tokens": lambda tokens: {"weights": tokens},
    "short weights": lambda tokens: {"tokens": tokens, "weights": tokens[1:]},
    "nan": lambda tokens: {"tokens": tokens, "weights": tokens * np.nan},
    "below 0": lambda tokens: {"tokens": tokens, "weights": -1.0 - tokens},
    "positions": lambda tokens: {"tokens": tokens, "positions": 3 + np.arange(len(tokens))},
    "columns": lambda tokens: tokens, "none": lambda tokens: None}


class Items:
    """Items of `--dataset_args`.

    length: number of items. plain: tokens alone. positions: also positions. scale: factor of the weights. version: of
    the fingerprint. broken, fault: an item, and what it is then. kill_after: items after which the rank kills itself.
    """

    def __init__(self, split: str, seq_length: int, settings: dict[str, Any]) -> None:
        self.split, self.seq_length, self.settings = split, seq_length, settings
        self.first = {"train": 0, "valid": 1000}[split]
        self.reads = 0

    def __len__(self) -> int:
        return int(self.settings.get("length", 40))

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.split == "train" and self.reads > self.settings.get("kill_after", 1e9):
            os.kill(os.getpid(), signal.SIGKILL)
        random = np.random.default_rng(self.first + index)
        lengths = random.integers(1, self.seq_length // 2, 2) + 1
        tokens = np.concatenate([random.integers(0, 200) + np.arange(length) for length in lengths])
        if index == self.settings.get("broken"):
            return FAULTS[self.settings["fault"]](tokens)
        weights = random.choice([0.0, 0.25, 1.0, 3.0], len(tokens)) * self.settings.get("scale", 1)
        if self.settings.get("plain"):
            return tokens
        positions = np.concatenate([np.arange(length) for length in lengths])
        return {"tokens": tokens, "weights": weights,
                "positions": positions if self.settings.get("positions") else None}

    def fingerprint(self) -> str:
        return f"{self.split} {self.settings.get('version', 1)}"


def build(split: str, seq_length: int, **settings: Any) -> Items | None:
    return None if split == "test" else Items(split, seq_length, settings)
