"""Reading pickles without running them: torch's weights-only unpickler and the few classes that DeepSpeed adds."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from pretrain.errors import ConfigError

# what a checkpoint of DeepSpeed 0.19.8 holds beside tensors and plain containers; none of them runs code when built
_ALLOWED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def load_pickle(path: Path, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote to `path`, on the host. With `mmap` tensors are read from the disk when they are used.

    Raises ConfigError where the file is no such file, or needs a class outside the allow-list (which it names).
    """
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ConfigError(str(path), found=_culprit(str(error)), expected="tensors, numbers, texts and containers",
                          remedy="the file was not written by this program: do not load it elsewhere") from None
    except Exception as error:  # whatever the unpickler makes of damaged bytes
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(str(path), found=f"an unreadable file ({first_line})",
                          expected="a file that torch.save wrote", remedy="the checkpoint is damaged") from None


def _culprit(message: str) -> str:
    """The class that torch's unpickler refused, from its message."""
    match = re.search(r"(?:GLOBAL|Global|global|class|Class|type) `?([\w.]+)`?", message)
    return f"a pickle that needs {match.group(1)}" if match else f"a pickle that is refused ({message[:200]!r})"
