"""The content of a checkpoint of another program, in the terms of a transformers model.

Each kind of checkpoint has a module with a function that reads a folder and returns a `ForeignRun` (`sources.py` lists
them). `adopt.py` writes it as a checkpoint of this program, whatever its kind. This module imports no torch.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError, printable, shorten

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
ReadState = Callable[[str, str], "torch.Tensor"]

_MOST_SETTINGS = 1000  # in the DeepSpeed JSON of a checkpoint
_JSON_BLOCKS = ("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "torch_autocast", "zero_optimization")
# Names that --accept_without takes: what a run needs, and what a checkpoint may lack.
OMISSIONS = {
    "optimizer": "the optimizer's states: the optimizer starts without them",
    "master_weights": "the fp32 master weights: the 16-bit weights are used, rounded",
    "data_position": "the number of samples that were consumed: the data begins at its first sample",
    "schedule": "the learning-rate schedule, or the position in it",
    "settings": "settings that change the numbers and have no counterpart; the message lists them",
    "loss_scale": "the state of fp16's loss scaler",
    "rng": "the states of the random number generators: dropout draws other values",
    "weight_decay": "weight decay of single parameters that no setting of this program describes",
    "other_states": "values that this program has no counterpart for; the message lists them",
}


@dataclass(frozen=True)
class Omission:
    """Something in the source, or missing in it, that the adopted run will not have."""

    name: str  # a key of OMISSIONS
    reason: str  # what exactly, and why: one clause for a message


@dataclass(frozen=True)
class ForeignRun:
    """The state of a run of another program, at one of its checkpoints.

    Parameters have the names of the transformers model (`AutoModelForCausalLM`, keys of its state_dict), whatever the
    source calls them. A tied head is not listed. Shapes are those of complete parameters without padding: `read` joins
    the parts of ranks, and removes rows that pad a vocabulary.
    """

    program: str  # in messages and the record, such as "transformers.Trainer, DeepSpeed ZeRO-2"
    folder: Path  # folder of the checkpoint
    files: tuple[Path, ...]  # all files that `read` uses; they are hashed for the record
    config: dict[str, Any]  # content of a transformers config.json
    shapes: Mapping[str, Shape]
    # (name, state) -> the complete tensor in fp32 on the CPU, in the parameter's shape. The state is "fp32" (master
    # weights) or one of `states`. Only what is asked for is in memory; files are memory-mapped where possible.
    read: ReadState
    states: tuple[str, ...]  # optimizer states with a number for each weight: ("exp_avg", "exp_avg_sq"); () if none
    step: int  # optimizer steps, with those that fp16 skipped: DeepSpeed's global_steps
    optimizer_step: float = 0  # the optimizer's own count, for bias correction
    skipped_steps: int = 0
    # as in a DeepSpeed JSON: {"type": "AdamW", "params": {"lr": ..., "betas": [...], "eps": ..., "weight_decay": ...}}
    optimizer: dict[str, Any] = field(default_factory=dict)
    weight_decay: Mapping[str, float] = field(default_factory=dict)  # weight decay of each parameter, by name
    learning_rate: float | None = None  # learning rate of the last step
    # flags of run.yaml, besides those of the other fields: label_smoothing, router_aux_loss
    flags: Mapping[str, Any] = field(default_factory=dict)
    # What is known of the schedule: "flags" (all that describe it), "type" (a name such as "cosine", or DeepSpeed's
    # scheduler.type), "warmup_steps", "total_steps", "last_step" (applied updates), "next_rate" (learning rate of the
    # next step), "first_rate_is_0" (the first step of a warm-up has rate 0, as in Megatron-LM), and whatever else the
    # source records. Unknown values are left out.
    schedule: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None  # samples
    consumed_samples: int | None = None  # None: not recorded
    consumed_tokens: int | None = None  # if the source counts tokens, and does not record how long a sample is
    seq_length: int | None = None  # tokens; None: not recorded
    precision: str = "fp32"  # "fp32", "bf16" or "fp16"
    loss_scale: dict[str, float] | None = None  # loss scale of fp16: keys as in Manifest.loss_scale
    seed: int | None = None
    ds_config: dict[str, Any] | None = None  # the DeepSpeed JSON of the run; None: another engine
    buffers: Mapping[str, Any] = field(default_factory=dict)  # tensors of the model's state that are no parameters
    omissions: tuple[Omission, ...] = ()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Turn the errors of code that meets values of unexpected types in the block into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError, ArithmeticError) as error:
        raise ConfigError(str(folder), problem="its files do not have the content that DeepSpeed and torch write "
                          f"({type(error).__name__}: {shorten(str(error), 100)})",
                          remedy="use another checkpoint") from None


def as_data(run: ForeignRun) -> ForeignRun:
    """Return the run with settings of JSON's types, and texts of one line. Raises ConfigError.

    A pickle may have any objects, cycles and line breaks, where the programs write numbers and names.
    """
    settings = {name: _as_json(run.folder, name, getattr(run, name)) for name in ("ds_config", "optimizer", "schedule")}
    given = settings["ds_config"] or {}
    if wrong := [name for name in _JSON_BLOCKS if not isinstance(given.get(name) or {}, dict)]:
        raise ConfigError(f"{run.folder}: ds_config: {wrong[0]}", found=given[wrong[0]], expected="an object",
                          remedy="use another checkpoint")
    return replace(run, **settings, program=printable(shorten(run.program)),
                   omissions=tuple(Omission(omission.name, printable(omission.reason)) for omission in run.omissions),
                   notes=tuple(map(printable, run.notes)))


def _as_json(folder: Path, name: str, value: Any) -> Any:
    """Return a copy of nested settings. Objects of other types become texts, which no setting accepts."""
    try:
        copied = json.loads(json.dumps(value, default=lambda other: f"a {type(other).__name__}"))
        count = _count_leaves(copied)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}: {name}", problem=f"its settings are no JSON: {shorten(str(error), 100)}",
                          remedy="use another checkpoint") from None
    if count > _MOST_SETTINGS:
        raise ConfigError(f"{folder}: {name}", found=f"{count} settings", expected=f"at most {_MOST_SETTINGS}",
                          remedy="use another checkpoint")
    return copied


def _count_leaves(value: Any) -> int:
    """Count what nested objects and lists hold. Each container counts, too."""
    if not isinstance(value, (dict, list)):
        return 1
    return 1 + sum(map(_count_leaves, value.values() if isinstance(value, dict) else value))


def with_sample_length(run: ForeignRun, seq_length: int) -> ForeignRun:
    """Return the run with the length of a sample in tokens, by which consumed tokens become samples.

    Raises ConfigError if the run records another length, or consumed no whole number of such samples.
    """
    if run.seq_length not in (None, seq_length):
        raise ConfigError("--seq_length", found=seq_length, expected=f"{run.seq_length}, as {run.folder} records")
    if run.consumed_tokens is None:
        return replace(run, seq_length=seq_length)
    if run.consumed_tokens % seq_length:
        raise ConfigError("--seq_length", found=seq_length, expected=f"a divisor of {run.consumed_tokens}, the tokens "
                          f"that {run.folder} has consumed")
    return replace(run, seq_length=seq_length, consumed_samples=run.consumed_tokens // seq_length)
