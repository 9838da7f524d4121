"""Names of floating dtypes."""

import torch

from pretrain.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_dtype(module: torch.nn.Module, precision: str) -> None:
    """Raise ConfigError unless the weights, or this rank's partitions of them, are in the precision that was chosen.

    DeepSpeed may choose another one by the device (defect S).
    """
    for name, weight in module.named_parameters():
        found = getattr(weight, "ds_tensor", weight).dtype
        if found != DTYPES[precision]:
            raise ConfigError(name, found=f"weights in {found}", expected=f"{DTYPES[precision]}, the precision chosen",
                              remedy="this device or DeepSpeed does not keep it: choose another precision")
