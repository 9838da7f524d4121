"""Keep runs that compile nothing from importing torch's compiler, and silence warnings about DeepSpeed's own calls.

Measured with torch 2.13 on 2 cores: a ZeRO-2 run of three steps takes 4.4 s of CPU time from the start of the process.
The import of `torch._dynamo` takes 1.1 s of them, and that of `torch._inductor.compile_fx` 1.0 s. ZeRO-3 still imports
`torch._dynamo` (DeepSpeed 0.19.8, runtime/zero/parameter_offload.py). Guarded by tests/engine/test_imports.py.
"""

import logging
import warnings

# torch 2.13 renamed these collectives and warns at the first call of each old name, on every rank. DeepSpeed 0.19.8
# calls the old names in comm/torch.py, and users cannot change this.
_RENAMED = ("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "_reduce_scatter_base")


def silence_renamed_collectives() -> None:
    """Ignore the FutureWarnings about collectives that DeepSpeed calls by their old names, and no other warnings."""
    for name in _RENAMED:
        warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.{name}` is", category=FutureWarning)


def silence_missing_cuda() -> None:
    """Silence the line "No CUDA runtime is found" of runs on the CPU, where nvcc is installed and no GPU is.

    torch prints it on every rank when DeepSpeed imports torch.utils.cpp_extension.
    """
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: record.levelno > logging.WARNING)


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
    from deepspeed.runtime import compiler

    original = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
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
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)
