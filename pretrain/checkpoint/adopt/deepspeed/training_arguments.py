"""Read the values in a training_args.bin of transformers, without its classes.

The file is a pickle of a `TrainingArguments`. A harmless class stands in for each class and function that it names, so
that nothing of it is imported or run.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.verify import pickle_globals

TRAINING_ARGS = "training_args.bin"
_ALWAYS = {"output_dir", "per_device_train_batch_size", "lr_scheduler_type"}  # attributes of any TrainingArguments


class _StandIn:
    """An object of any class: the arguments of its constructor, and its attributes."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> "_StandIn":
        found = super().__new__(cls)
        found.arguments = arguments
        return found

    def __init__(self, *arguments: Any) -> None:
        pass


def read_training_arguments(folder: Path) -> dict[str, Any]:
    """Return the settings in a folder's training_args.bin that are numbers, strings, dicts or members of enums.

    A member of an enum is its value. Returns {} if there is no such file, if it cannot be read in this way, or if its
    object is no TrainingArguments.
    """
    path = folder / TRAINING_ARGS
    if not path.is_file():
        return {}
    try:
        names = [name.replace(" ", ".").replace("__builtin__", "builtins") for name in pickle_globals(path)]
        stand_ins: list[Any] = [(_StandIn, name) for name in names if not name.startswith(("torch.", "collections."))]
        with torch.serialization.safe_globals(stand_ins):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # damaged bytes make the unpickler raise many types of exceptions
        return {}
    found = {key: _plain(each) for key, each in vars(value).items()} if isinstance(value, _StandIn) else {}
    if not found.keys() >= _ALWAYS:
        return {}
    return {key: each for key, each in found.items() if isinstance(each, (bool, int, float, str, dict))}


def _plain(value: Any) -> Any:
    """Return the value of an enum's member, for which the stand-in has the constructor's argument; others as is."""
    if isinstance(value, _StandIn) and value.arguments and isinstance(value.arguments[-1], str):
        return value.arguments[-1].lower()
    return value


def schedule_of(arguments: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """Return `ForeignRun.schedule` as far as the Trainer's arguments describe it; {} if they do not."""
    kind = arguments.get("lr_scheduler_type")
    if not isinstance(kind, str):
        return {}
    warmup, ratio = arguments.get("warmup_steps", 0), arguments.get("warmup_ratio", 0)  # ratio: before transformers 5
    if warmup <= 0:
        warmup = ratio if isinstance(ratio, (int, float)) else 0
    steps = int(warmup) if warmup >= 1 else math.ceil(total_steps * warmup)
    given = arguments.get("lr_scheduler_kwargs")
    settings = given if isinstance(given, dict) else {}
    names = {"min_lr": "min_lr", "min_lr_rate": "min_lr_ratio"}
    lowest = {ours: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None}
    unknown = {"params": settings} if settings.keys() - names.keys() else {}
    return {"type": kind, "warmup_steps": steps, "total_steps": total_steps, "first_rate_is_0": True, **lowest,
            **unknown}
