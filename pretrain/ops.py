"""Build DeepSpeed's compiled operators once, ahead of the first run, instead of inside its first step.

    python -m pretrain.ops [--offload]
"""

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from pretrain.device import detect_device, has_nvcc
from pretrain.distributed import prepare_deepspeed

# op_builder class names, by what they serve
_OPERATORS = {
    "cpu": {"FusedAdamBuilder": "Adam and AdamW", "ShareMemCommBuilder": "collectives within a host"},
    "cuda": {"FusedAdamBuilder": "Adam and AdamW; without nvcc torch's own serve"},
}
_OFFLOAD = {"AsyncIOBuilder": "NVMe offload", "CPUAdamBuilder": "offloaded Adam and AdamW",
            "CPULionBuilder": "offloaded Lion"}


def missing_operator(name: str) -> str:
    """"" if this machine can have the operator (by its op_builder class), otherwise why not."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(name)
    if builder is not None and builder.is_compatible(verbose=False):
        return ""
    return "needs Debian's libaio-dev" if name == "AsyncIOBuilder" else "not for this machine"


def _build(name: str) -> str:
    """"" once the operator is compiled (now or earlier), otherwise why it cannot be."""
    from deepspeed.accelerator import get_accelerator

    missing = missing_operator(name)
    if missing:
        return missing
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:  # a compiler's failure, of any type: told by its last line
        return f"does not compile: {str(error).strip().splitlines()[-1]}"
    return ""


def build_operators(*, offload: bool) -> bool:
    """Compile what this device uses, two at a time; True if all of it is there."""
    prepare_deepspeed(detect_device())
    # ninja would start cores + 2 compilers for each of the two, of a gigabyte and more each
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 1) // 2)))
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from pretrain.operator_lock import lock_operators_by_process

    lock_operators_by_process()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = get_accelerator()
    operators = {**_OPERATORS.get(accelerator.device_name(), {}), **(_OFFLOAD if offload else {})}
    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=2) as pool:
        for (name, purpose), failure in zip(operators.items(), pool.map(_build, operators), strict=True):
            state = failure or f"ready after {time.perf_counter() - start:.0f} s"
            print(f"  {name.removesuffix('Builder')} ({purpose}): {state}", flush=True)
            operators[name] = failure
    has_substitutes = accelerator.device_name() == "cuda" and not has_nvcc()
    return has_substitutes or not any(operators.values())


if __name__ == "__main__":
    sys.exit(0 if build_operators(offload="--offload" in sys.argv[1:]) else 1)
