"""Attention computed from its definition, one operator after the other, with all scores in memory."""

import math

import torch

from pretrain.model.kernels.cpu.attention import AttentionSettings
from pretrain.model.kernels.cpu_attention import Scores
from pretrain.model.kernels.documents import Documents


def eager_attention(q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor,
                    settings: AttentionSettings | Scores) -> torch.Tensor:
    """Return [B, H, T, E] in the dtype of q. Rotations are not applied."""
    length = q_BHTE.shape[2]
    k, v = (x.repeat_interleave(q_BHTE.shape[1] // x.shape[1], dim=1) for x in (k_BKTE, v_BKTE))
    s = (settings.scale or q_BHTE.shape[-1] ** -0.5) * (q_BHTE @ k.transpose(2, 3))
    if settings.softcap:
        s = settings.softcap * torch.tanh(s / settings.softcap)
    distance = torch.arange(length) - torch.arange(length)[:, None]  # key position - query position
    if settings.alibi_slopes is not None:
        s = s + (settings.alibi_slopes.to(torch.float64)[:, None, None] * distance).to(s.dtype)
    hidden = (distance > 0) | (distance <= -(settings.window or length))
    if settings.documents is not None:
        number = (settings.documents.positions_BT == 0).cumsum(1)
        hidden = hidden | (number[:, None, :, None] != number[:, None, None, :])
    return torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v


def documents_of(*lengths: tuple[int, ...]) -> Documents:
    """Return the documents of samples that consist of documents of these lengths."""
    return Documents(torch.tensor([[position for length in sample for position in range(length)]
                                   for sample in lengths]))
