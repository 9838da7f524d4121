"""Compile DeepSpeed's operators in parallel before the first run. Otherwise the run compiles them one after another.

    python -m pretrain.engine.build_ops [--offload]
"""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

from pretrain.cli import Parser, run_main
from pretrain.distributed.device import compiles_cuda, detect_device
from pretrain.engine.prepare import prepare_deepspeed

# name of DeepSpeed's op_builder class -> purpose of the operator; the slowest compilation is first
_OFFLOAD = {"AsyncIOBuilder": "NVMe offload", "CPUAdamBuilder": "offloaded Adam and AdamW",
            "CPULionBuilder": "offloaded Lion"}
_OPERATORS = {
    "cpu": {"FusedAdamBuilder": "Adam and AdamW", "ShareMemCommBuilder": "collectives within a host"},
    "cuda": {"FusedAdamBuilder": "Adam and AdamW; without nvcc torch's optimizers are used"},
}
_GIB_PER_COMPILER = 1.5  # host memory
READY, NOT_COMPILED = "ready", "not compiled yet"  # states of an operator


def why_not_compilable(name: str) -> str:
    """Return the reason why this machine cannot compile an operator; "" if it can.

    `name` is the name of an op_builder class, such as "AsyncIOBuilder".
    """
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(name)
    if builder is not None and builder.is_compatible(verbose=False):
        return ""
    return "needs the Debian package libaio-dev" if name == "AsyncIOBuilder" else "not supported on this machine"


def _build(name: str) -> str:
    """Compile an operator if it is not compiled yet. Return "" on success, otherwise the reason for the failure."""
    from deepspeed.accelerator import get_accelerator

    reason = why_not_compilable(name)
    if reason:
        return reason
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:  # a failed compilation can raise any type of exception
        return str(error).strip().splitlines()[-1]
    return ""


def operator_states() -> dict[str, str]:
    """Return for each operator READY, NOT_COMPILED, or the reason why this machine cannot compile or load it.

    Afterwards this process compiles no operators.
    """
    prepare_deepspeed(detect_device())
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from pretrain.engine.operator_cache import NotCompiledError, load_only_compiled

    deepspeed.utils.logger.setLevel(logging.CRITICAL)
    load_only_compiled()
    states = {}
    for name in (*_OPERATORS.get(get_accelerator().device_name(), {}), *_OFFLOAD):
        try:
            states[name] = why_not_compilable(name)
            if not states[name]:
                get_accelerator().create_op_builder(name).load(verbose=False)
                states[name] = READY
        except NotCompiledError:
            states[name] = NOT_COMPILED
        except Exception as error:  # DeepSpeed's builders raise any type of exception
            states[name] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return {name.removesuffix("Builder"): state for name, state in states.items()}


def _num_parallel_compilers() -> int:
    """Return the number of parallel compilers: one for each core, or fewer if memory is short."""
    import psutil

    return max(1, min(len(os.sched_getaffinity(0)), int(psutil.virtual_memory().available / 2**30 / _GIB_PER_COMPILER)))


def build_operators(*, offload: bool) -> bool:
    """Compile the operators for this device, and print the result for each. Return whether runs have what they need.

    This is True if every operator is ready. On CUDA without nvcc it is always True: Adam and AdamW without offload then
    use torch's optimizers. Operators for offload have no substitute; their failure is only printed.
    """
    prepare_deepspeed(detect_device())
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = get_accelerator()
    operators = {**(_OFFLOAD if offload else {}), **_OPERATORS.get(accelerator.device_name(), {})}
    compilers = _num_parallel_compilers()
    os.environ.setdefault("MAX_JOBS", str(max(1, compilers // len(operators))))  # ninja's jobs per operator
    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=compilers) as pool:
        failures = dict(zip(operators, pool.map(_build, operators), strict=True))
    for name, purpose in operators.items():
        print(f"  {name.removesuffix('Builder')} ({purpose}): {failures[name] or 'ready'}")
    print(f"  compilation took {time.perf_counter() - start:.0f} s", flush=True)
    # without nvcc, torch's Adam is used instead of FusedAdam
    has_substitutes = accelerator.device_name() == "cuda" and not compiles_cuda()
    return has_substitutes or not any(failures.values())


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--offload", action="store_true",
                        help="also compile the operators for offload to host memory and NVMe")
    return 0 if build_operators(offload=parser.parse_args().offload) else 1


if __name__ == "__main__":
    run_main(main)
