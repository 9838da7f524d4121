"""Attention computed from its definition, one operator after the other, with all scores in memory."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from pretrain.model.kernels.documents import Documents


def eager_attention(q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor,
                    settings: Any, documents: Documents | None = None) -> torch.Tensor:
    """Return [B, H, T, E] in the dtype of q. Rotations are not applied.

    `settings` has the scale, window, softcap and alibi_slopes of AttentionSettings, and perhaps documents.
    """
    documents = getattr(settings, "documents", documents)
    length = q_BHTE.shape[2]
    k, v = (x.repeat_interleave(q_BHTE.shape[1] // x.shape[1], dim=1) for x in (k_BKTE, v_BKTE))
    s = (settings.scale or q_BHTE.shape[-1] ** -0.5) * (q_BHTE @ k.transpose(2, 3))
    if settings.softcap:
        s = settings.softcap * torch.tanh(s / settings.softcap)
    distance = torch.arange(length) - torch.arange(length)[:, None]  # key position - query position
    if settings.alibi_slopes is not None:
        s = s + (settings.alibi_slopes.to(torch.float64)[:, None, None] * distance).to(s.dtype)
    hidden = (distance > 0) | (distance <= -(settings.window or length))
    if documents is not None:
        number = (documents.positions_BT == 0).cumsum(1)
        hidden = hidden | (number[:, None, :, None] != number[:, None, None, :])
    return torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v


def heads(batch: int, heads: int, kv_heads: int, length: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k and v with the memory layout of the projection's output, and a gradient of the attention's output."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(batch, length, n, size, generator=generator).to(dtype).transpose(1, 2) for n in sizes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def as_arguments(settings: Any) -> dict[str, Any]:
    """Return the keywords of `torch_causal_attention`."""
    return {"scale": settings.scale, "window": settings.window, "softcap": settings.softcap,
            "alibi_slopes": settings.alibi_slopes}


def output_and_gradients(compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor,
                         *arguments: Any, **keywords: Any) -> list[torch.Tensor]:
    """Return the output of an attention, and the gradients of its inputs."""
    out = compute(*inputs, *arguments, **keywords)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def alone(compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], documents: Documents,
          *arguments: Any) -> torch.Tensor:
    """Compute the attention of each document by itself, and concatenate the outputs."""
    samples = []
    for sample, positions_T in enumerate(documents.positions_BT):
        bounds = [*(positions_T == 0).nonzero()[:, 0].tolist(), len(positions_T)]
        parts = ([x[sample:sample + 1, :, start:stop] for x in inputs] for start, stop in itertools.pairwise(bounds))
        samples.append(torch.cat([compute(*part, *arguments) for part in parts], dim=2))
    return torch.cat(samples)


def documents_of(*lengths: tuple[int, ...]) -> Documents:
    """Return the documents of samples that consist of documents of these lengths."""
    return Documents(torch.tensor([[position for length in sample for position in range(length)]
                                   for sample in lengths]))
