"""The GPU of a rank: opened before the process group forms, with one line if CUDA gives the rank none.

A broken one may accept kernels that compute nothing, so that it has to add numbers before a program relies on it.
"""

import os
import re
import socket
from pathlib import Path

from pretrain.active_extensions import advice_on
from pretrain.distributed.device import VISIBLE
from pretrain.distributed.process import is_out_of_memory
from pretrain.distributed.world import World
from pretrain.errors import CRASHED, ConfigError

_OWN_CONTEXT_BYTES = 2**30  # what this process and the driver hold may be half of it
_NUMBERS = 1000  # that a GPU adds


class DeviceError(ConfigError):
    """A GPU does not compute. On another one, the program may succeed."""

    exit_code = CRASHED


def open_gpu(world: World) -> None:
    """Make this rank's GPU the current one, and let CUDA open it. Raises ConfigError if CUDA does not.

    Otherwise torch's error is the traceback of whatever needs the GPU first.
    """
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        raise _why_no_gpu(str(error)) from None
    check_device_index(world, torch.cuda.device_count())
    try:
        torch.cuda.set_device(world.local_rank)
        torch.empty(1, device="cuda")  # CUDA before version 12 opens a GPU at its first use
    except RuntimeError as error:
        raise _why_unusable(world.local_rank, error) from None


def check_device_index(world: World, num_devices: int) -> None:
    """Reject a rank without a device of its own. Rank N of a host uses device N of those that it sees."""
    if world.local_rank < num_devices:
        return
    remedy = f"start at most one rank per GPU, and let each rank see all GPUs of its host ({VISIBLE})"
    if world.launcher == "slurm":
        remedy = "give the GPUs to the node instead of the task: --gpus-per-node instead of --gpus-per-task, and " \
                 "--gpu-bind=none"
    if "MIG-" in os.environ.get(VISIBLE, ""):
        remedy = "CUDA gives a program one MIG instance: train on one rank, or disable MIG"
    raise ConfigError(VISIBLE, found=f"{num_devices} devices for rank {world.local_rank} of this host",
                      expected=f"at least {world.local_rank + 1}", remedy=remedy)


def free_gpu_bytes(needed_bytes: int) -> int:
    """Return the free memory of the current GPU. Raises ConfigError if other programs hold what the run needs.

    Args:
        needed_bytes: of this run, predicted; 0: unknown. The prediction may be a tenth too high.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    if total - free > _OWN_CONTEXT_BYTES and free < 0.9 * needed_bytes < total:
        raise ConfigError(_name(torch.cuda.current_device()), problem=f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB "
                          f"are free, and the run needs {needed_bytes / 2**30:.1f} GiB: other programs hold the rest",
                          remedy=f"end them (`nvidia-smi` lists them), or choose another GPU by {VISIBLE}")
    return free


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


def _why_no_gpu(error: str) -> ConfigError:
    """Return what keeps CUDA from finding any device."""
    import torch

    if old := re.search(r"too old \(found version (\d+)\)", error):
        supported = f"{int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"
        return ConfigError("NVIDIA driver", problem=f"it supports CUDA up to {supported}, and torch "
                           f"{torch.__version__} is built for CUDA {torch.version.cuda}",
                           remedy=f"update the driver, or install a torch that is built for CUDA {supported}")
    for path in sorted(Path("/dev").glob("nvidia*")):
        try:
            if re.fullmatch(r"nvidia(\d+|ctl|-uvm)", path.name):
                os.close(os.open(path, os.O_RDWR))
        except OSError as reason:
            return ConfigError(str(path), problem=f"it cannot be opened ({reason.strerror}), so that CUDA finds no GPU",
                               remedy="join the group that owns the file, or start the container with --gpus all")
    if visible := os.environ.get(VISIBLE):
        return ConfigError(VISIBLE, problem=f"CUDA finds no device of {visible!r}",
                           remedy="`nvidia-smi -L` lists numbers and UUIDs")
    return ConfigError("CUDA", problem=error.strip().splitlines()[0], remedy="; ".join(advice_on("cuda")))


def _why_unusable(number: int, error: RuntimeError) -> ConfigError:
    """Return why a device that CUDA lists cannot be used."""
    problem, remedy = str(error).strip().splitlines()[0], "; ".join(advice_on("cuda"))
    if "busy or unavailable" in problem:
        problem = "it is busy: another process has it in exclusive mode, or its compute mode allows none"
        remedy = "end that process (`nvidia-smi` lists it), or sudo nvidia-smi --compute-mode=DEFAULT"
    elif is_out_of_memory(error):
        problem = "its memory is full before the run begins: other programs hold it"
        remedy = f"end them (`nvidia-smi` lists them), or choose another GPU by {VISIBLE}"
    return ConfigError(_name(number), problem=problem, remedy=remedy)


def _name(number: int) -> str:
    words = os.environ.get(VISIBLE, "").split(",")
    return f"GPU {words[number].strip() if number < len(words) and words[number] else number}"
