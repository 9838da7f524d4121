"""Keep runs that compile nothing from importing torch's compiler, which takes two of their five seconds of start-up.

Measured with torch 2.13 on 2 cores, seconds of CPU: `torch._dynamo` 1.1, `torch._inductor.compile_fx` 1.0, of the 4.4
that three steps of a small ZeRO-2 run take from the start of the process. ZeRO-3 imports the first all the same
(DeepSpeed 0.19.8, runtime/zero/parameter_offload.py). Guarded by tests/engine/test_imports.py.
"""

import warnings

# torch 2.13 renames two collectives, and warns of the old names at the first call of each, on every rank. DeepSpeed
# 0.19.8 calls them in comm/torch.py; users can do nothing about it.
_RENAMED = ("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "_reduce_scatter_base")


def silence_renamed_collectives() -> None:
    """Drop the FutureWarnings of DeepSpeed's own calls, and no others."""
    for name in _RENAMED:
        warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.{name}` is", category=FutureWarning)


def leave_out_compiler() -> None:
    """Keep DeepSpeed and torch's optimizers from importing torch's compiler, in a process that compiles nothing."""
    _import_muon_as_it_is()
    _mark_optimizers_as_never_compiled()


def _import_muon_as_it_is() -> None:
    """DeepSpeed 0.19.8 imports Muon with every ZeRO optimizer (runtime/zero/utils.py), and Muon hands its functions to
    torch.compile right then (runtime/zero/muon/original_muon.py).
    """
    from deepspeed.runtime import compiler

    original = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = original


def _mark_optimizers_as_never_compiled() -> None:
    """torch wraps some methods so that they are never compiled, and imports `torch._dynamo` at the first call to do so
    (torch/_compile.py, _disable_dynamo). Without a compiler the wrapped method is what it would be anyway.
    """
    from torch.optim import Optimizer

    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)
