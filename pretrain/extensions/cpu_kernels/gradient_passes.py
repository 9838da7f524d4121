"""Passes over the gradients between the backward pass and Adam, in C, on CPUs.

DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py) divides the gradients by the number of ranks, reads them twice to find
NaN and infinity, converts them to fp64 for their norm, concatenates them, converts the result to fp32, and multiplies
it by the factor of clipping. Here each gradient is divided, and read three times: for NaN and infinity, for the norm,
and for its scaled copy in fp32, of which only a piece exists at a time with DeepSpeed's Adam. In bf16 this takes 0.15
of the time. The values are the same, except for the last bits of a norm in fp64, and of gradients in bf16 on a number
of ranks that is not a power of two: they are multiplied by the inverse instead of divided. On one rank there is no
division (patches/zero.py).

DeepSpeed's flops profiler does not see functions in C: `count_functions_in_c` counts their FLOPs, guarded by
tests/extensions/cpu_kernels/test_profiled_flops.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.ops.adam import FusedAdam
from deepspeed.profiling.flops_profiler import profiler as flops_profiler
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.distributed.requirements import shortcut
from pretrain.extensions.cpu_kernels import attention_in_c, c_functions
from pretrain.extensions.cpu_kernels.attention_in_c import AttentionSettings
from pretrain.extensions.cpu_kernels.c_functions import euclidean_norm, has_not_finite, multiply_, scale_to_float_
from pretrain.extensions.cpu_kernels.choice import in_c
from pretrain.extensions.cpu_kernels.memory import PIECE_ELEMENTS


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


def patch_engine(engine: DeepSpeedEngine) -> None:
    """Make passes over gradients in C, and let the flops profiler count the functions in C."""
    pass_over_gradients_in_c(engine)
    if (profiler := getattr(engine, "flops_profiler", None)) is not None:
        count_functions_in_c(profiler)


def pass_over_gradients_in_c(engine: DeepSpeedEngine) -> None:
    """Replace these passes of ZeRO-1 and ZeRO-2, and the norm of ZeRO-3.

    Gradients that the C functions do not accept still take DeepSpeed's passes, as do all gradients with Muon.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)) \
            or engine.optimizer_name() == "muon" or not _in_c(torch.empty(1, dtype=optimizer.dtype,
                                                                          device=engine.device)):
        return
    passes = [_compute_norms]
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        passes += [_find_not_finite, _average, *([] if optimizer.cpu_offload else [_flatten_scaled])]
    for replace_pass in passes:
        with shortcut("a pass over the gradients"):  # before 0.19.4, no function flattens them
            replace_pass(optimizer)


def _in_c(gradient: torch.Tensor) -> bool:
    return in_c("optimizer", gradient, torch.bfloat16, torch.float32) and gradient.is_contiguous()


def _compute_norms(optimizer: Any) -> None:
    """Compute the norm of each gradient without a copy in fp64.

    DeepSpeed's function combines the norms of the tensors that it is given. So it is given the norms themselves.
    """
    norm_of_all = optimizer.get_grad_norm_direct

    def get_grad_norm_direct(gradients: Any, parameters: Any, norm_type: float = 2) -> torch.Tensor:
        norms = [euclidean_norm(gradient).reshape(1) if norm_type == 2 and _in_c(gradient) else gradient
                 for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        total: torch.Tensor = norm_of_all(norms, parameters, norm_type)
        return total

    optimizer.get_grad_norm_direct = get_grad_norm_direct


def _find_not_finite(optimizer: Any) -> None:
    """Read each gradient once to find NaN and infinity."""
    check = optimizer._has_inf_or_nan
    optimizer._has_inf_or_nan = lambda x, j=None: has_not_finite(x) if _in_c(x) else check(x, j)


def _average(optimizer: Any) -> None:
    """Divide buckets in bf16 by the number of ranks, which torch does at a few percent of the memory's rate."""
    average, _ = optimizer.average_tensor, optimizer.gradient_average  # the second one is read and set below

    def average_tensor(bucket: torch.Tensor, dtype: torch.dtype) -> None:
        divides = optimizer.gradient_average and optimizer.reduce_scatter and bucket.dtype == torch.bfloat16
        if not divides or not _in_c(bucket):
            average(bucket, dtype)
            return
        multiply_(bucket, optimizer.sequence_parallel_size / dist.get_world_size(optimizer.dp_process_group))
        optimizer.gradient_average = False
        try:
            average(bucket, dtype)
        finally:
            optimizer.gradient_average = True

    optimizer.average_tensor = average_tensor


def _flatten_scaled(optimizer: Any) -> None:
    """Make the flat fp32 gradients of a group in one pass, multiplied by the factor of clipping.

    For DeepSpeed's Adam, only a piece of them exists at a time (`_update_in_pieces`).
    """
    get_flat, unscale = optimizer._get_preflattened_grad_partition, optimizer.unscale_and_clip_grads
    scaled: list[torch.Tensor] = []  # the flat gradients of the current group, if they have been multiplied already
    waiting = _update_in_pieces(optimizer.optimizer) if isinstance(optimizer.optimizer, FusedAdam) else None

    def get_preflattened_grad_partition(group: int) -> torch.Tensor | None:
        flat: torch.Tensor | None = get_flat(group)
        gradients, master = optimizer.averaged_gradients[group], optimizer.single_partition_of_fp32_groups[group]
        if flat is not None or master.dtype != torch.float32 or not all(map(_in_c, gradients)):
            return flat
        factor = torch.ones(1)
        unscale([factor], _scaled_norm(optimizer))
        sizes = [gradient.numel() for gradient in gradients]
        if waiting is not None:
            flat = torch.empty(1).expand(sum(sizes))  # a tensor of this size, but without its memory
            waiting[:] = [(flat.untyped_storage()._cdata, gradients, float(factor))]
        else:
            flat = torch.empty(sum(sizes))
            for gradient, part in zip(gradients, flat.split(sizes), strict=True):
                scale_to_float_(part, gradient, float(factor))
        scaled[:] = [flat]
        return flat

    def unscale_and_clip_grads(gradients: list[torch.Tensor], total_norm: Any) -> None:
        if not any(gradients[0] is flat for flat in scaled):
            unscale(gradients, total_norm)
        scaled.clear()

    optimizer._get_preflattened_grad_partition = get_preflattened_grad_partition
    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def _update_in_pieces(adam: Any) -> list[tuple[int, list[torch.Tensor], float]]:
    """Let DeepSpeed's Adam update a flat tensor piece by piece, so that its fp32 gradients need little memory.

    Returns a list for (storage of the tensor in the place of the flat gradients, gradients, factor).
    """
    update, waiting = adam.multi_tensor_adam, []  # type: Any, list[tuple[int, list[torch.Tensor], float]]

    def multi_tensor_adam(chunk: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], *numbers: Any) -> None:
        if not waiting or tensors[0][0].untyped_storage()._cdata != waiting[0][0]:
            update(chunk, overflow, tensors, *numbers)
            return
        _, gradients, factor = waiting.pop()
        start = 0
        for piece in _scaled_pieces(gradients, factor):
            states = [[flat.narrow(0, start, piece.numel())] for (flat,) in tensors[1:]]
            update(chunk, overflow, [[piece], *states], *numbers)
            start += piece.numel()

    adam.multi_tensor_adam = multi_tensor_adam
    return waiting


def _scaled_pieces(gradients: list[torch.Tensor], factor: float) -> Iterator[torch.Tensor]:
    """Yield the concatenated gradients in fp32, multiplied by the factor, always in the same memory."""
    piece, filled = torch.empty(min(PIECE_ELEMENTS, sum(gradient.numel() for gradient in gradients))), 0
    for gradient in gradients:
        for part in gradient.view(-1).tensor_split(
                tuple(range(PIECE_ELEMENTS - filled, gradient.numel(), PIECE_ELEMENTS))):
            scale_to_float_(piece.narrow(0, filled, part.numel()), part, factor)
            filled += part.numel()
            if filled == piece.numel():
                yield piece
                filled = 0
    if filled:
        yield piece[:filled]


def _scaled_norm(optimizer: Any) -> Any:
    """Return the norm that `step` will pass to unscale_and_clip_grads: with the loss scale, which is 1 without fp16."""
    norm_of_step = optimizer._global_grad_norm
    return norm_of_step if norm_of_step is None else norm_of_step * optimizer.loss_scale
