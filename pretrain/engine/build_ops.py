"""Compile DeepSpeed's operators ahead of the first run, several at a time; a run compiles what it lacks one by one.

    python -m pretrain.engine.build_ops [--offload]
"""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

from pretrain.cli import Parser, run_main
from pretrain.distributed.device import detect_device, has_nvcc
from pretrain.engine.prepare import prepare_deepspeed

# op_builder class name -> its purpose; the longest to compile first
_OFFLOAD = {"AsyncIOBuilder": "NVMe offload", "CPUAdamBuilder": "offloaded Adam and AdamW",
            "CPULionBuilder": "offloaded Lion"}
_OPERATORS = {
    "cpu": {"FusedAdamBuilder": "Adam and AdamW", "ShareMemCommBuilder": "collectives within a host"},
    "cuda": {"FusedAdamBuilder": "Adam and AdamW; without nvcc torch's own serve"},
}
_GIB_PER_COMPILER = 1.5


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
    except Exception as error:  # a compiler's failure, of any type: reported by its last line
        return str(error).strip().splitlines()[-1]
    return ""


def _compilers_at_once() -> int:
    """Number of compilers: one a core, or fewer where memory is short."""
    import psutil

    return max(1, min(len(os.sched_getaffinity(0)), int(psutil.virtual_memory().available / 2**30 / _GIB_PER_COMPILER)))


def build_operators(*, offload: bool) -> bool:
    """Compile what this device uses; True if all of it is there."""
    prepare_deepspeed(detect_device())
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = get_accelerator()
    operators = {**(_OFFLOAD if offload else {}), **_OPERATORS.get(accelerator.device_name(), {})}
    compilers = _compilers_at_once()
    os.environ.setdefault("MAX_JOBS", str(max(1, compilers // len(operators))))  # that ninja starts for one operator
    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=compilers) as pool:
        failures = dict(zip(operators, pool.map(_build, operators), strict=True))
    for name, purpose in operators.items():
        print(f"  {name.removesuffix('Builder')} ({purpose}): {failures[name] or 'ready'}")
    print(f"  all in {time.perf_counter() - start:.0f} s", flush=True)
    has_substitutes = accelerator.device_name() == "cuda" and not has_nvcc()
    return has_substitutes or not any(failures.values())


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--offload", action="store_true", help="also those for offload to host memory and NVMe")
    return 0 if build_operators(offload=parser.parse_args().offload) else 1


if __name__ == "__main__":
    run_main(main)
