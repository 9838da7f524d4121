"""Causal attention in C: in bf16 with rotation of queries and keys (RoPE), for CPUs with its dot products; in fp32.

The matrix products in attention.c use AMX or AVX512_BF16. The operator reads queries, keys and values where the
projection wrote them, and writes their gradients into one tensor of the same layout. It keeps its inputs, its output,
and the logarithms of the softmax sums for the backward pass.

Measured on one core of an Intel Xeon with AMX, forward and backward, 8 heads of 64: 0.28 of the time of the operator in
attention_products.py at 8 x 512 positions, 0.18 at 2 x 2,048; 0.23 and 0.29 of the time of torch's operator.

In fp32 (attention_fp32.c), the usual case alone is in C: the output of the projection, without what AttentionSettings
adds. Forward and backward on one AMD core: 0.69 of the time of torch's operator at 12 x 64 positions with 4 heads of
32, 0.49 at 8 x 512 with 8 heads of 64.

Shapes: B batch, T positions, H query heads, K key/value heads, G = H + 2 K, E elements per head.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.extensions.cpu_kernels.library import call
from pretrain.model.kernels import torch_attention
from pretrain.model.kernels.documents import Documents, first_keys
from pretrain.model.kernels.torch_attention import AttentionKernel, Rotation

_Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of an attention; they mean the same as in torch_attention.py.

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


class AttentionInC(AttentionKernel):
    """Attention in bf16."""

    def __call__(self, inputs: _Tensors, settings: torch_attention.AttentionSettings, rope: Rotation | None,
                 documents: Documents | None, dropout: float) -> torch.Tensor:
        tables = None if rope is None else rope.tables_for(inputs[0], documents)
        return attention(inputs, AttentionSettings(settings.num_heads, settings.scale, settings.window,
                                                   settings.softcap, settings.alibi_slopes, tables, documents))


class AttentionInFp32(AttentionKernel):
    """Attention in fp32, if `is_usual`."""

    def __call__(self, inputs: _Tensors, settings: torch_attention.AttentionSettings, rope: Rotation | None,
                 documents: Documents | None, dropout: float) -> torch.Tensor:
        return attention_fp32(inputs[0], settings.num_heads, settings.scale)


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


def is_usual(inputs: _Tensors, settings: torch_attention.AttentionSettings, documents: Documents | None) -> bool:
    """Return whether `attention_fp32` computes this attention: its heads have a multiple of 32 elements."""
    length, size = inputs[0].shape[1], inputs[0].shape[3]
    return (len(inputs) == 1 and size % 32 == 0 and not 0 < settings.window < length and not settings.softcap
            and settings.alibi_slopes is None and (documents is None or documents.are_whole_samples))


def attention_fp32(qkv_BTGE: torch.Tensor, num_heads: int, scale: float = 0.0) -> torch.Tensor:
    """Return fp32 [B, T, H, E], if `is_usual`."""
    out: torch.Tensor = _AttentionFp32.apply(qkv_BTGE.contiguous(), num_heads, scale)
    return out


class _AttentionFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, qkv_BTGE: torch.Tensor, num_heads: int, scale: float) -> torch.Tensor:
        batch, length, heads, size = qkv_BTGE.shape
        sizes = (batch, length, num_heads, (heads - num_heads) // 2, size, float(scale or 1 / math.sqrt(size)))
        out_BTHE = qkv_BTGE.new_empty(batch, length, num_heads, size)
        logs_BHT = qkv_BTGE.new_empty(batch, num_heads, length)
        call("attention_fp32", qkv_BTGE, out_BTHE, logs_BHT, *sizes)
        ctx.save_for_backward(qkv_BTGE, out_BTHE, logs_BHT)
        ctx.sizes = sizes  # type: ignore[attr-defined]
        return out_BTHE

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv_BTGE, out_BTHE, logs_BHT = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = torch.empty_like(qkv_BTGE)
        call("attention_fp32_backward", qkv_BTGE, out_BTHE, grads[0].contiguous(), logs_BHT, gradient,
             *ctx.sizes)  # type: ignore[attr-defined]
        return gradient, None, None


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
