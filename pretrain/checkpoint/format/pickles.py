"""Make values safe to pickle, and load checkpoint pickles without running code from them.

Enum members are saved as plain values. Loading uses torch's weights-only unpickler, with an allow-list that adds the
few classes that DeepSpeed saves. One of a checkpoint's pickles has the states of a rank's random number generators.
"""

import pickle
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from pretrain.errors import ConfigError


def without_enums(value: Any) -> Any:
    """Copy nested dicts, lists and tuples, with int and str enum members replaced by their plain values.

    Python 3.11.0 to 3.11.3 pickle a member as `getattr(cls, name)` (enum.py, Enum.__reduce_ex__), which torch's
    weights-only reader rejects. DeepSpeed 0.19.8 saves ZeroStageEnum in each optimizer file, and compares it as an int.
    """
    if isinstance(value, Enum) and isinstance(value, (int, str)):
        return value.value
    if type(value) is dict:
        return {key: without_enums(item) for key, item in value.items()}
    if type(value) in (list, tuple):  # subclasses, such as torch.Size, hold no enums
        return type(value)(without_enums(item) for item in value)
    return value


def load_pickle(path: Path, *, mmap: bool = False, also: Sequence[Any] = (), content: IO[bytes] | None = None) -> Any:
    """Load a `torch.save` file into host memory. With `mmap`, tensors are read from disk on first use.

    `also` extends the allow-list: classes, or pairs of a stand-in and the name in the file that it stands for.
    `content` is read instead of `path`, which then is a name for messages. Raises ConfigError if the file cannot be
    read, or if it needs a class outside the allow-list.
    """
    try:
        with torch.serialization.safe_globals([*_ALLOWED, *also]):
            return torch.load(path if content is None else content, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ConfigError(str(path), found=_rejected_class(str(error)),
                          expected="tensors, numbers, strings and containers",
                          remedy="nothing in the file was run; a program that loads the file without such a check may"
                                 " run any code") from None
    except Exception as error:  # damaged bytes make the unpickler raise many types of exceptions
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(str(path), found=f"an unreadable file ({first_line})",
                          expected="a file that torch.save wrote", remedy="use another checkpoint") from None


def _member(*arguments: Any) -> Any:
    """Stand in for `getattr` while a pickle is loaded.

    Python 3.11.0 to 3.11.3 pickle a member of an enum as `getattr(CLASS, NAME)`: return it for ZeroStageEnum, and for a
    stand-in with the method `member_named`. Raises UnpicklingError for any other arguments.
    """
    owner: Any
    owner, name = arguments if len(arguments) == 2 else (None, None)
    if owner is ZeroStageEnum and name in ZeroStageEnum.__members__:
        return ZeroStageEnum[name]
    if isinstance(owner, type) and "member_named" in vars(owner) and isinstance(name, str):
        return vars(owner)["member_named"].__get__(None, owner)(name)
    raise pickle.UnpicklingError(f"GLOBAL builtins.getattr called with {arguments!r:.150}")


# Classes in checkpoints of DeepSpeed 0.19.8, besides tensors and plain containers, and the stand-in for getattr.
# Creating them runs no code from the file.
_ALLOWED: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address,
                       (_member, "builtins.getattr")]


def _rejected_class(message: str) -> str:
    """Describe a rejected pickle, with the class that the error message of torch's unpickler names, if it names one."""
    match = re.search(r"(?:GLOBAL|Global|global|class|Class|type) `?([\w.]+)`?", message)
    return f"a pickle that needs {match.group(1)}" if match else f"a pickle that is rejected ({message[:200]!r})"


def rng_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in a checkpoint folder."""
    return folder / f"rng_state_rank_{rank:05d}.pt"


def rng_state() -> dict[str, torch.Tensor]:
    """Return the current states of torch's generators: "cpu" and, with an accelerator, "device"."""
    device = get_accelerator()
    states = {"cpu": torch.get_rng_state()}
    if device.device_name() != "cpu":
        states["device"] = device.get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned; the device's state is ignored on a machine without an accelerator."""
    torch.set_rng_state(states["cpu"])
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["device"])
