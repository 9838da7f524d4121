"""Causal attention in C with rotation of queries and keys (RoPE), for CPUs with dot products of bf16.

The matrix products in attention.c use AMX or AVX512_BF16. The operator reads queries, keys and values where the
projection wrote them, and writes their gradients into one tensor of the same layout. It keeps its inputs, its output,
and the logarithms of the softmax sums for the backward pass.

Measured on one core of an Intel Xeon with AMX, forward and backward, 8 heads of 64: 0.28 of the time of the operator in
cpu_attention.py at 8 x 512 positions, 0.18 at 2 x 2,048; 0.23 and 0.29 of the time of torch's operator.

Shapes: B batch, T positions, H query heads, K key/value heads, G = H + 2 K, E elements per head.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.cpu.library import call
from pretrain.model.kernels.documents import Documents, first_keys

_Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of an attention; they mean the same as the arguments of `causal_attention` in cpu_attention.py.

    Args:
        tables: bf16 cosines and sines [T, R / 2], or [B, 1, T, R / 2]: the first R elements of queries and keys are
            rotated; None: nothing is rotated.
    """

    num_heads: int
    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    documents: Documents | None = None


@functools.cache
def instructions() -> int:
    """Return what the products use: 2 AMX, 1 AVX512_BF16; 0: this CPU has neither, and there is no C function."""
    result = torch.zeros(1, dtype=torch.int64, device="cpu")
    call("attention_instructions", result)
    return int(result)


def attention(inputs: _Tensors, settings: AttentionSettings) -> torch.Tensor:
    """Return bf16 [B, T, H, E]. The inputs are (qkv [B, T, G, E],) or (q [B, T, H, E], k [B, T, K, E], v [B, T, K, E]).

    `instructions()` must not be 0.
    """
    out: torch.Tensor = _Attention.apply(settings, *(x.contiguous() for x in inputs))
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, settings: AttentionSettings, *inputs: torch.Tensor) -> torch.Tensor:
        batch, length, _, size = inputs[0].shape
        out_BTHE = inputs[0].new_empty(batch, length, settings.num_heads, size)
        logs_BHT = inputs[0].new_empty(batch, settings.num_heads, length, dtype=torch.float32)
        call("attention", *_heads(inputs, settings), out_BTHE, logs_BHT, *_arguments(inputs, settings))
        ctx.save_for_backward(*inputs, out_BTHE, logs_BHT)
        ctx.settings = settings  # type: ignore[attr-defined]
        return out_BTHE

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, out_BTHE, logs_BHT = ctx.saved_tensors  # type: ignore[attr-defined]
        settings: AttentionSettings = ctx.settings  # type: ignore[attr-defined]
        gradients = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
        call("attention_backward", *_heads(inputs, settings), out_BTHE, grads[0].contiguous(), logs_BHT,
             *_heads(gradients, settings), *_arguments(inputs, settings))
        return None, *gradients


def _heads(tensors: _Tensors, settings: AttentionSettings) -> _Tensors:
    """Return tensors that begin with the first head of queries, of keys and of values."""
    if len(tensors) == 3:
        return tensors
    kv_heads = (tensors[0].shape[2] - settings.num_heads) // 2
    return tensors[0].split((settings.num_heads, kv_heads, kv_heads), dim=2)


def _arguments(inputs: _Tensors, settings: AttentionSettings) -> tuple[torch.Tensor | int | float | None, ...]:
    """Return the arguments of the C functions after the tensors: `SETTINGS` in attention.c."""
    batch, length, _, size = inputs[0].shape
    kv_heads = _heads(inputs, settings)[1].shape[2]
    steps = [x.shape[2] * size for x in inputs] * (3 // len(inputs))
    cos, sin = (None, None) if settings.tables is None else (table.contiguous() for table in settings.tables)
    rotary, table_step = (0, 0) if cos is None else (2 * cos.shape[-1], cos[0].numel() if cos.dim() == 4 else 0)
    window = 0 if settings.window >= length else settings.window
    # made for each block, because this takes microseconds
    first = first_keys(torch.arange(length, device="cpu")[None], window)[0] if settings.documents is None else \
        first_keys(settings.documents.positions_BT, window)
    return (batch, length, settings.num_heads, kv_heads, size, *steps, cos, sin, rotary, table_step,
            first, length if first.dim() == 2 else 0, settings.alibi_slopes,
            float(settings.scale or 1 / math.sqrt(size)), float(settings.softcap), int(instructions() == 2))
