"""Let a GPU add numbers before a program relies on it: a broken one may accept kernels that compute nothing."""

import socket

from pretrain.active_extensions import advice_on
from pretrain.errors import CRASHED, ConfigError

_NUMBERS = 1000


class DeviceError(ConfigError):
    """A GPU does not compute. On another one, the program may succeed."""

    exit_code = CRASHED


def require_computing(index: int) -> None:
    """Raise DeviceError unless GPU `index` of this host adds numbers correctly. Waits for the GPU once."""
    import torch

    expected = _NUMBERS * (_NUMBERS - 1) // 2
    try:
        found = int(torch.arange(_NUMBERS, device=torch.device("cuda", index)).sum())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # CUDA's errors, such as "no kernel image is available for execution on the device"
        problem = f"it cannot add numbers: {str(error).splitlines()[0]}"
    else:
        if found == expected:
            return
        problem = f"the device computes {'wrongly' if found else 'nothing'}: the sum of 0 to {_NUMBERS - 1} is {found}"
    raise DeviceError(f"GPU {index} of {socket.gethostname()}", problem=problem, remedy="; ".join([
        "leave it out (CUDA_VISIBLE_DEVICES), or its host", *advice_on("device")]))
