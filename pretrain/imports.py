"""A run that compiles nothing does without torch's compiler, whose import takes two of its five seconds of start-up.

Measured with torch 2.13 on 2 cores, seconds of CPU: `torch._dynamo` 1.1, `torch._inductor.compile_fx` 1.0, of the 4.4
that three steps of a small ZeRO-2 run take from the start of the process. ZeRO-3 imports the first all the same
(DeepSpeed 0.19.8, runtime/zero/parameter_offload.py). Guarded by tests/test_imports.py.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

# torch 2.13 renames two collectives, and warns of the old names at the first call of each, on every rank. DeepSpeed
# 0.19.8 calls them in comm/torch.py; users can do nothing about it.
_RENAMED = ("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "_reduce_scatter_base")


def silence_renamed_collectives() -> None:
    """Drop the FutureWarnings of DeepSpeed's own calls, and no others."""
    for name in _RENAMED:
        warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.{name}` is", category=FutureWarning)


def _compile_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            import torch

            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call


def import_muon_without_compiler() -> None:
    """Import Muon so that its function is compiled at its first call.

    DeepSpeed 0.19.8 imports Muon with every ZeRO optimizer (runtime/zero/utils.py), and Muon compiles it right then
    (runtime/zero/muon/original_muon.py).
    """
    from deepspeed.runtime import compiler

    now = compiler.compile
    compiler.compile = lambda: _compile_at_first_call
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = now


def leave_out_dynamo() -> None:
    """Keep the optimizers of a run that compiles nothing from importing `torch._dynamo`.

    torch wraps some of their methods so that they are never compiled, and imports it at the first call to do so
    (torch/_compile.py, _disable_dynamo). Without a compiler the wrapped method is what it would be anyway.
    """
    from torch.optim import Optimizer

    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)
