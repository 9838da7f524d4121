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
from pretrain.config.trainer_schedules import schedule_flags
from pretrain.errors import shorten
from pretrain.extensions.adopt.foreign_run import Omission

TRAINING_ARGS = "training_args.bin"
_ALWAYS = {"output_dir", "per_device_train_batch_size", "lr_scheduler_type"}  # attributes of any TrainingArguments
_DEEPEST = 3  # objects in objects
_MOST_STEPS = 2**63


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
    """Return the settings in a folder's training_args.bin that are JSON values, members of enums, or simple objects.

    A member of an enum is its value, and another object a dict of its attributes. Returns {} if there is no such
    file, if it cannot be read in this way, or if its object is no TrainingArguments.
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
    found = _plain(value)
    if not (isinstance(found, dict) and found.keys() >= _ALWAYS):
        return {}
    return {key: each for key, each in found.items() if each is None or
            isinstance(each, (bool, int, float, str, dict, list))}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return the value of an enum's member, for which the stand-in has the constructor's argument; others as they are.

    Another object is a dict of its attributes.
    """
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value] if depth < _DEEPEST else None
    if not isinstance(value, _StandIn):
        return value
    if value.arguments and isinstance(value.arguments[-1], str):
        return value.arguments[-1].lower()
    attributes = {key: each for key, each in vars(value).items() if key != "arguments"}
    return {key: _plain(each, depth + 1) for key, each in attributes.items()} if depth < _DEEPEST else None


def schedule_of(arguments: Mapping[str, Any], total_steps: int,
                step: int) -> tuple[dict[str, Any], tuple[Omission, ...]]:
    """Return `ForeignRun.schedule` as the Trainer's arguments describe it after `step`; ({}, ()) if they do not.

    A schedule that no flags describe is an omission.
    """
    kind, given = arguments.get("lr_scheduler_type"), arguments.get("lr_scheduler_kwargs")
    if not isinstance(kind, str):
        return {}, ()
    # warmup_ratio: before transformers 5
    numbers = [value for name in ("warmup_steps", "warmup_ratio")
               if isinstance(value := arguments.get(name), (int, float)) and 0 < value < _MOST_STEPS]
    warmup = numbers[0] if numbers else 0
    steps = int(warmup) if warmup >= 1 else math.ceil(total_steps * warmup)
    flags, reason = schedule_flags(kind, given if isinstance(given, dict) else {}, warmup=steps, total=total_steps,
                                   passed=step)
    found = {"type": kind, "warmup_steps": steps, "total_steps": total_steps, "flags": flags}
    if not reason:
        return found, ()
    return found, (Omission("schedule", f"{shorten(reason, 200)}; the flags --lr_... give another one"),)
