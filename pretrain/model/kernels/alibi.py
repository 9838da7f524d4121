"""Slopes of ALiBi, attention with linear biases (arXiv 2108.12409), for BLOOM and MPT."""

import functools
import math

import torch


@functools.cache
def alibi_slopes(num_heads: int, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """Return fp32 [num_heads] on the CPU: 2^(-8 h / n) for head h = 1 .. n, if n = num_heads is a power of two.

    If `ranks` share the heads, return only the num_heads / ranks slopes of `rank`.

    For other head counts, n is the next smaller power of two, and the heads after the first n have the slopes of 2 n
    heads for h = 1, 3, 5 ... (transformers: models/bloom/modeling_bloom.py, models/mpt/modeling_mpt.py).
    Equal arguments give the same tensor, so that all layers share the mask that torch_attention.py makes from it.
    """
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / n) for head in range(1, n + 1)]
    slopes += [2 ** (-8 * head / (2 * n)) for head in range(1, 2 * (num_heads - n), 2)]
    with torch.inference_mode(False):  # autograd saves no inference tensors
        own_heads = num_heads // ranks
        return torch.tensor(slopes[rank * own_heads:][:own_heads], dtype=torch.float32, device="cpu")
