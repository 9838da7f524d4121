"""Choose the data type and the number of devices of a model that generates. Imports no torch."""

import importlib.util
from collections.abc import Sequence

from pretrain.distributed.device import Device, multiplies_bf16
from pretrain.errors import ConfigError

USABLE_MEMORY = 0.9  # fraction of the free memory for weights and cache; activations need the rest
_GIB = 2**30


def choose_dtype(requested: str, precision: str, device: Device) -> str:
    """Return "fp32", "bf16" or "fp16": what --dtype requests, or for "auto" the precision of the run.

    If the device computes slowly in this precision, "auto" becomes fp32.
    """
    if requested != "auto":
        return requested
    fast = {"bf16": multiplies_bf16()} if device.kind == "cpu" else {"bf16": device.bf16, "fp16": device.fp16}
    return precision if fast.get(precision) else "fp32"


def check_devices(requested: int | None, device: Device) -> None:
    """Raise ConfigError if --devices requests several devices, and layers cannot be spread over them."""
    if requested is not None and requested > 1:
        if device.kind == "cpu":
            raise ConfigError("--devices", found=requested, expected="1: layers are spread over GPUs only, and this "
                              "machine has none that torch can use")
        require_accelerate()


def require_accelerate() -> None:
    """Raise ConfigError if the package accelerate is missing. Imports no torch."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("--devices", problem="several devices need the Python package accelerate, which is not "
                          "installed", remedy="pip install -c launch/constraints.txt -e '.[generate]'")


def choose_num_devices(needed: int, free: Sequence[int], requested: int | None, what: str) -> int:
    """Return the number of devices for a model that needs `needed` bytes.

    Args:
        free: bytes of free memory of each device.
        requested: --devices; None: as few devices as possible.
        what: the model and its precision, for the message.

    Raises:
        ConfigError: there are fewer devices than requested, or the model does not fit.
    """
    if requested is not None and requested > len(free):
        raise ConfigError("--devices", found=requested, expected=f"at most {len(free)}, the devices of this machine")
    enough = next((count for count in range(1, len(free) + 1) if sum(free[:count]) * USABLE_MEMORY >= needed), None)
    count = requested or enough or len(free)
    if enough is None or enough > count:
        has = f"{sum(free[:count]) / _GIB:.1f} GiB"
        devices = "the device has" if count == 1 else f"{count} devices have"
        remedy = f"use --devices {enough}" if enough else \
            "use a 16-bit --dtype, a smaller --batch_size, or a machine with more memory"
        raise ConfigError(what, problem=f"the model and its key-value cache take {needed / _GIB:.1f} GiB, and "
                          f"{devices} {has} of free memory", remedy=remedy)
    return count
