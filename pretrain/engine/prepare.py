"""Set up a process before it uses DeepSpeed: for --deterministic, and without work that a run does not need.

Measured with torch 2.13 on 2 cores: a ZeRO-2 run of three steps takes 4.4 s of CPU time from the start of the process.
The import of `torch._dynamo` takes 1.1 s of them, `torch._inductor.compile_fx` 1.0 s. ZeRO-3 still imports
`torch._dynamo` (DeepSpeed 0.19.8, runtime/zero/parameter_offload.py). Guarded by tests/engine/test_prepare.py.
"""

import functools
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from pretrain.distributed.device import Device
from pretrain.distributed.device import cpuinfo as proc_cpuinfo
from pretrain.distributed.requirements import shortcut

# torch 2.13 renamed these collectives and warns at the first call of each old name, on every rank. DeepSpeed 0.19.8
# calls the old names in comm/torch.py, and users cannot change this.
_RENAMED = ("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "_reduce_scatter_base")
_ARCHITECTURES = {"x86_64": "X86_64", "aarch64": "ARM_8"}  # platform.machine() -> py-cpuinfo's name
_FEATURES = ("flags", "Features")  # the keys of x86 and Arm
# --deterministic. What differs between two runs on GPUs without it: kernels that add with atomic instructions (the
# backward passes of attention and of embeddings, scatter_add), the workspace of cuBLAS, and choices that torch measures
# at the start.
# cuBLAS is reproducible with a workspace of its own for each stream (NVIDIA's documentation of cuBLAS, section 2.1.4).
# The order of a sum over ranks depends on NCCL's algorithm, which NCCL chooses by its own estimates of times; with
# NVLS, the switch adds. torch's Inductor then chooses kernels without measurements (torch 2.10).
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "TORCHINDUCTOR_DETERMINISTIC": "1"}
_MISSING = re.compile(r"(\w+) does not have a deterministic implementation")


def prepare_deepspeed(device: Device, *, deterministic: bool = False) -> None:
    """Prepare this process for DeepSpeed. Imports torch.

    - With `deterministic`, set the variables that CUDA's libraries read.
    - Let CUDA's allocator extend its segments, so that tensors of changing sizes leave fewer unusable gaps.
    - Set the accelerator; otherwise DeepSpeed guesses it and prints a warning.
    - Put this environment's `ninja` first in PATH.
    - Read the CPU's features from /proc/cpuinfo; DeepSpeed would measure them for 1 s.
    - Load compiled operators from the cache of `operator_cache`.
    - On a CPU, let DeepSpeed examine only the operator of its collectives; it would examine all.
    - On a CPU, import DeepSpeed with a Muon that compiles nothing.
    - With torch 2.6, start the processes of torch's compiler at the first compilation. It would start one per core, at
      most 32, in each rank: at the import of torch._inductor, which DeepSpeed's moe/sharded_moe.py causes.
    """
    if device.kind == "cuda" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read at the first allocation
    if device.kind == "cuda" and deterministic:
        set_deterministic_variables()
    silence_missing_cuda()
    import torch

    from pretrain.engine.operator_cache import cache_operators

    if "TORCH_WARM_POOL" not in os.environ and torch.__version__ < "2.7":
        os.environ["TORCH_WARM_POOL"] = "0"
    silence_renamed_collectives()
    with shortcut("features of the CPU from /proc/cpuinfo"):
        read_features_from_proc()
    os.environ.setdefault("DS_ACCELERATOR", device.kind)
    scripts = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != scripts:
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    cache_operators()
    if device.kind == "cpu":
        with shortcut("examine one operator"):
            examine_one_operator()
        import_muon_uncompiled()


def examine_one_operator() -> None:
    """Set the operators that DeepSpeed can compile here: of all, its process group needs only the one for collectives.

    DeepSpeed 0.19.8 examines all nine operators of a CPU on every rank (ops/__init__.py, `_probe_compatible_ops`), and
    runs the C compiler twice for it: 0.1 s. Earlier versions examine them when they are imported.
    """
    from deepspeed import ops
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and "__compatible_ops__" not in vars(ops):
        vars(ops)["__compatible_ops__"] = {builder.NAME: builder.is_compatible(verbose=False)}


def silence_renamed_collectives() -> None:
    """Ignore the FutureWarnings about collectives that DeepSpeed calls by their old names, and no other warnings."""
    for name in _RENAMED:
        warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.{name}` is", category=FutureWarning)


def silence_missing_cuda() -> None:
    """Silence two warnings about a CUDA that torch cannot use, on every rank: a run that needs CUDA ends with a line.

    One is "No CUDA runtime is found", also of runs on the CPU where nvcc is installed and no GPU is. torch prints it
    when DeepSpeed imports torch.utils.cpp_extension. The other one is "CUDA initialization: ...", at is_available.
    """
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.msg)
    warnings.filterwarnings("ignore", message="CUDA initialization", category=UserWarning)


def avoid_compiler_imports() -> None:
    """Keep DeepSpeed and torch's optimizers from importing torch's compiler, in a process that compiles nothing."""
    import_muon_uncompiled()
    _mark_optimizer_methods_as_uncompiled()


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without torch.compile.

    DeepSpeed 0.19.8 imports Muon with every ZeRO optimizer (runtime/zero/utils.py), and Muon passes its functions to
    torch.compile at import (runtime/zero/muon/original_muon.py). On a CPU this compilation takes minutes of the first
    step of a run with Muon, once for each shape of a matrix, without a line of output.
    """
    with shortcut("Muon without torch.compile"):
        from deepspeed.runtime import compiler

        original = compiler.compile  # not in 0.18.0, which does not compile Muon
        compiler.compile = lambda: lambda function: function
        try:
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
        finally:
            compiler.compile = original


def _mark_optimizer_methods_as_uncompiled() -> None:
    """Mark those optimizer methods that torch excludes from compilation, before their first call.

    At the first call torch would import `torch._dynamo` only to mark them (torch/_compile.py, _disable_dynamo).
    """
    from torch.optim import Optimizer

    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)


def read_features_from_proc() -> None:
    """Replace `cpuinfo.get_cpu_info` in this process. On other platforms, only cache its answer.

    Before DeepSpeed 0.19.8 loads an operator (ops/op_builder/builder.py, `cpu_arch` and `simd_width`), it calls
    py-cpuinfo 9.0.0. On x86 this package measures the clock rate in a child process, for 1.0 to 1.2 s, also if the
    operator is compiled already. DeepSpeed reads only the architecture, the vendor and the names of the features.
    """
    import cpuinfo  # here, because its import starts a process

    slow = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info = lambda: _from_proc() or slow()


@functools.cache
def _from_proc() -> dict[str, Any]:
    """Return architecture, vendor and features under py-cpuinfo's names; empty if they are unknown."""
    lines = proc_cpuinfo().splitlines()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = next((values[key].split() for key in _FEATURES if key in values), [])
    if platform.machine() not in _ARCHITECTURES or not features:
        return {}
    vendor = {"vendor_id_raw": values["vendor_id"]} if "vendor_id" in values else {}  # Arm has none
    return {"arch": _ARCHITECTURES[platform.machine()], "flags": features, **vendor}


def set_deterministic_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of a process that trains on a GPU. Those of the user remain: run_rules.py has checked them."""
    for name, value in VARIABLES.items():
        environ.setdefault(name, value)


def set_deterministic(deterministic: bool) -> None:
    """Make torch use deterministic operators only, and raise an error where there is none; or, as usual, the fastest.

    torch's flash attention is deterministic only if the mode is not `warn_only`; then cuDNN's attention is not used,
    and the memory-efficient kernel does not divide the keys (torch 2.13, native/transformers/cuda/sdp_utils.cpp,
    attention_backward.cu).
    """
    import torch

    if deterministic == torch.are_deterministic_algorithms_enabled():
        return  # the next call imports torch's compiler, which takes a second
    torch.use_deterministic_algorithms(deterministic)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", not deterministic)  # noqa: B010 (for mypy)
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        torch.backends.cudnn.benchmark = False


def operator_without_variant(error: BaseException) -> str:
    """Return the operator of which torch has no deterministic variant, if this is the error; otherwise ""."""
    found = _MISSING.search(str(error))
    return found[1] if found else ""
