"""DeepSpeed's flops profiler does not see functions in C: they are counted here.

Guarded by tests/extensions/cpu_kernels/test_profiled_flops.py.
"""

from typing import Any

import torch
from deepspeed.profiling.flops_profiler import profiler as flops_profiler

from pretrain.extensions.cpu_kernels import attention_in_c, c_functions
from pretrain.extensions.cpu_kernels.attention_in_c import AttentionSettings


def count_functions_in_c(profiler: Any) -> None:
    """Let a FlopsProfiler count linear layers and attention in C while it profiles.

    DeepSpeed 0.19.8 (profiling/flops_profiler/profiler.py, start_profile) replaces torch's functions while it profiles.
    The replacements count FLOPs from the shapes of their arguments. Functions in C call none of them.
    """
    start_profile, stop_profile = profiler.start_profile, profiler.stop_profile
    inner_product, attention = c_functions.inner_product, attention_in_c.attention

    def counted_product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        _count("linear", flops_profiler._linear_flops_compute(x, weight_OI))
        return inner_product(x, weight_OI, bias_O)

    def counted_attention(inputs: tuple[torch.Tensor, ...], settings: AttentionSettings) -> torch.Tensor:
        out = attention(inputs, settings)
        q_BHTE = out.transpose(1, 2)
        _count("attention", flops_profiler._attn_flops_compute(q_BHTE, q_BHTE, q_BHTE))
        return out

    def start(*args: Any, **kwargs: Any) -> None:
        start_profile(*args, **kwargs)
        _replace(counted_product, counted_attention)

    def stop() -> None:
        _replace(inner_product, attention)
        stop_profile()

    profiler.start_profile, profiler.stop_profile = start, stop


def _replace(product: Any, attention: Any) -> None:
    c_functions.inner_product, attention_in_c.attention = product, attention


def _count(name: str, counts: tuple[int, int]) -> None:
    """Add FLOPs and multiply-accumulates to the module that is called now, as the profiler's `wrapFunc` does."""
    for found, count in zip((flops_profiler.module_flop_count, flops_profiler.module_mac_count), counts, strict=True):
        if found:
            found[-1].append((name, count))
