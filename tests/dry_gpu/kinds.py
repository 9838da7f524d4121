"""Rows of the tables of runs and commands on a dry GPU, also in the tests of extensions (gpu_runs.py)."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.support.byte_tokenizer import write_byte_corpus
from tests.support.cases import config, flags
from tests.support.extensions import entries_of_extensions

STEPS = 4
NOTHING = "the device computes nothing"
FLAGS, RUN, NEW = ["FLAGS"], "RUN", "NEW"  # stand for the flags and the folder of the run, and for a new folder


def bf16(stage: int, **others: Any) -> dict[str, Any]:
    return config(stage, precision="bf16", micro=2, **others)


class Kind(NamedTuple):
    """A run: its DeepSpeed JSON and flags, the devices, and a part of its output."""

    json: dict[str, Any]
    flags: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    devices: int = 1
    part: str = ""
    capability: int = 80


def text_flags(folder: Path) -> dict[str, Any]:
    """Write data into a folder. Returns the flags of a run whose tokens have a tokenizer."""
    write_byte_corpus(folder)
    return {**flags(str(folder / "corpus"), steps=STEPS), "model_overrides": "vocab_size=260,n_layer=2,n_embd=64",
            "split": "70,20,10", "tokenizer": folder / "tokenizer", "eval_interval": 2, "save_interval": 2,
            **entries_of_extensions("gpu_runs", "FLAGS_OF_TEXT")}
