"""Causal attention: the operator, and its implementation by torch's operators, for every device and dtype.

Saved for the backward pass:
- usual case, windows and ALiBi: what F.scaled_dot_product_attention saves: q, k, v, its output and the logarithms of
  the softmax sums, if it uses a fused kernel. With a window, ALiBi or documents, k and v have as many heads as q. The
  mask is made once for all layers: bool [T, T] for a window, [1, H, T, T] in the dtype of q for ALiBi, and for each
  micro-batch with documents [B, 1, T, T] or, with ALiBi, [B, H, T, T] in the dtype of q (documents.py).
- soft-capping: q, k, v (k and v with as many heads as q) and three tensors [B, H, T, T], because torch has no fused
  kernel for it: the tanh in the dtype of q, the softmax in fp32, and the same in the dtype of q. Dropout adds its mask
  and its output.

On CUDA, flex_attention.py computes these cases, except the usual one, as fused kernels without a mask, if it can.
"""

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from pretrain.model.attention_memory import has_flash
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.flex_attention import block_mask, flex_causal_attention, why_not_flex
from pretrain.model.operators import Operator

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of the attention of a layer.

    Args:
        num_heads: query heads, a multiple of `num_kv_heads`.
        scale: factor of the scores; 0: 1 / sqrt(E).
        window: number of latest positions that a query sees, with its own; 0: all.
        softcap: scores become softcap * tanh(scores / softcap); 0: no cap.
        alibi_slopes: fp32 [H] from `alibi_slopes`: slope * (key position - query position) is added to the scores.
    """

    num_heads: int
    num_kv_heads: int
    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


class Rotation(Protocol):
    """Rotary positions: `Rope` of layers/rope.py."""

    def tables_for(self, x_BTHE: torch.Tensor, documents: Documents | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for queries or keys."""

    def rotate(self, x_BHTE: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Return rotated queries or keys."""


class AttentionKernel:
    """Computes attention by torch's operators.

    Args:
        plain: use no custom kernel, as with --plain_operators.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self.plain = plain

    def __call__(self, inputs: Tensors, settings: AttentionSettings, rope: Rotation | None,
                 documents: Documents | None, dropout: float) -> torch.Tensor:
        """Return [B, T, H, E]. The inputs are (qkv [B, T, H + 2 K, E],) or (q [B, T, H, E], k [B, T, K, E], v)."""
        heads, kv_heads = settings.num_heads, settings.num_kv_heads
        parts = inputs if len(inputs) == 3 else inputs[0].split((heads, kv_heads, kv_heads), dim=2)
        q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in parts)
        if rope is not None:
            q_BHTE, k_BKTE = rope.rotate(q_BHTE, documents), rope.rotate(k_BKTE, documents)
        window = 0 if settings.window >= q_BHTE.shape[2] else settings.window  # it would mask nothing
        return self.attend(q_BHTE, k_BKTE, v_BKTE, dropout=dropout, scale=settings.scale, window=window,
                           softcap=settings.softcap, alibi_slopes=settings.alibi_slopes,
                           documents=documents).transpose(1, 2)

    def attend(self, q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, dropout: float, scale: float,
               window: int, softcap: float, alibi_slopes: torch.Tensor | None,
               documents: Documents | None) -> torch.Tensor:
        """Return [B, H, T, E] from rotated queries and keys."""
        on_cpu = q_BHTE.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and documents is not None and documents.are_whole_samples:
            documents = None
        return torch_causal_attention(q_BHTE, k_BKTE, v_BKTE, dropout=dropout, scale=scale, window=window,
                                      softcap=softcap, alibi_slopes=alibi_slopes, documents=documents,
                                      plain=self.plain)


ATTENTION = Operator(AttentionKernel())  # its inputs are those of the kernel
PLAIN_ATTENTION = AttentionKernel(plain=True)


def torch_causal_attention(q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, dropout: float = 0.0,
                           scale: float = 0.0, window: int = 0, softcap: float = 0.0,
                           alibi_slopes: torch.Tensor | None = None,
                           documents: Documents | None = None, plain: bool = False) -> torch.Tensor:
    """Return [B, H, T, E]. `dropout`: of the probabilities. See AttentionSettings for the other arguments."""
    grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
    has_mask = window > 0 or alibi_slopes is not None or documents is not None
    if not has_mask and not softcap:
        if grouped and not takes_fewer_heads(q_BHTE):
            grouped, k_BKTE, v_BKTE = False, _repeat_heads(k_BKTE, q_BHTE), _repeat_heads(v_BKTE, q_BHTE)
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, dropout_p=dropout,
                                              scale=scale or None, enable_gqa=grouped)
    if not plain and not why_not_flex(q_BHTE, dropout=dropout, on_cuda=q_BHTE.device.type == "cuda"):
        return flex_causal_attention(q_BHTE, k_BKTE, v_BKTE, scale=scale or 1 / math.sqrt(q_BHTE.shape[-1]),
                                     window=window, softcap=softcap, alibi_slopes=alibi_slopes, documents=documents)
    mask = _mask(q_BHTE, window, alibi_slopes, documents)
    if softcap:
        return _softcapped(q_BHTE, k_BKTE, v_BKTE, mask, dropout=dropout,
                           scale=scale or 1 / math.sqrt(q_BHTE.shape[-1]), softcap=softcap)
    if grouped:  # torch 2.x has no fused kernel on CUDA for a mask and fewer key/value heads than query heads
        k_BKTE, v_BKTE = _repeat_heads(k_BKTE, q_BHTE), _repeat_heads(v_BKTE, q_BHTE)
    return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, dropout_p=dropout,
                                          scale=scale or None)


def takes_fewer_heads(q_BHTE: torch.Tensor) -> bool:
    """Return whether torch has a fused kernel for fewer key/value heads than query heads, without a mask.

    On CUDA it is the flash kernel. Where only the efficient kernel computes q, the math kernel would be chosen, which
    keeps all scores (torch 2.13).
    """
    precision = "fp32" if q_BHTE.dtype == torch.float32 else "bf16"
    return q_BHTE.device.type != "cuda" or has_flash(precision=precision, head_size=q_BHTE.shape[3])


def _softcapped(q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, mask: torch.Tensor, *,
                dropout: float, scale: float, softcap: float) -> torch.Tensor:
    """Compute the scores, cap them, mask them, and take the softmax in fp32, one operator each."""
    k_BHTE, v_BHTE = _repeat_heads(k_BKTE, q_BHTE), _repeat_heads(v_BKTE, q_BHTE)
    tanh_BHTT = torch.tanh(q_BHTE @ k_BHTE.transpose(2, 3) * (scale / softcap))
    scores_BHTT = tanh_BHTT * softcap
    scores_BHTT = scores_BHTT.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores_BHTT + mask
    p_BHTT = torch.softmax(scores_BHTT, -1, dtype=torch.promote_types(q_BHTE.dtype, torch.float32)).to(q_BHTE.dtype)
    return F.dropout(p_BHTT, dropout) @ v_BHTE


def _repeat_heads(x_BKTE: torch.Tensor, q_BHTE: torch.Tensor) -> torch.Tensor:
    """Return [B, H, T, E]: each key/value head once for every query head that uses it."""
    repeats = q_BHTE.shape[1] // x_BKTE.shape[1]
    return x_BKTE if repeats == 1 else x_BKTE.repeat_interleave(repeats, dim=1)


def make_mask(q_BHTE: torch.Tensor, window: int, alibi_slopes: torch.Tensor | None, documents: Documents, *,
              dropout: float = 0.0, plain: bool = False) -> None:
    """Make the mask of a micro-batch for queries of this shape, dtype and device, before it is used."""
    length = documents.positions_BT.shape[1]
    window = 0 if window >= length else window
    if not plain and not why_not_flex(q_BHTE, dropout=dropout, on_cuda=q_BHTE.device.type == "cuda"):
        block_mask(length, q_BHTE.device, window, documents)
    else:
        _mask(q_BHTE, window, alibi_slopes, documents)


def _mask(q_BHTE: torch.Tensor, window: int, alibi_slopes: torch.Tensor | None,
          documents: Documents | None) -> torch.Tensor:
    """Return the mask for q, which is made once for all layers: see `_visible`, `_alibi` and `Documents.mask`."""
    if documents is not None:
        alibi = None if alibi_slopes is None else _shared_mask(q_BHTE.shape[2], window, q_BHTE.device, q_BHTE.dtype,
                                                               alibi_slopes)
        return documents.mask(window, q_BHTE.dtype, alibi)
    return _shared_mask(q_BHTE.shape[2], window, q_BHTE.device, q_BHTE.dtype, alibi_slopes)


def _shared_mask(length: int, window: int, device: torch.device, dtype: torch.dtype,
                 alibi_slopes: torch.Tensor | None) -> torch.Tensor:
    if alibi_slopes is None:
        return _visible(length, window, device)
    return _alibi(alibi_slopes, length, window, dtype, device)


# torch.compile would make and save a mask for each layer. This is what torch.compiler.assume_constant_result does
# (torch 2.13, _dynamo/decorators.py); that function also imports torch._dynamo, which takes 1 s and 70 MB.
setattr(_shared_mask, "_dynamo_marked_constant", True)  # noqa: B010 (mypy knows no such attribute)


@functools.lru_cache(maxsize=4)
def _visible(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return bool [T, T]: whether a query (row) sees a key (column)."""
    with torch.inference_mode(False):  # autograd saves no inference tensors
        positions = torch.arange(length, device=device)
        distances = positions - positions[:, None]
        return (distances <= 0) & (distances > -(window or length))


@functools.lru_cache(maxsize=2)  # the slopes, compared by identity, belong to one model: see alibi.py
def _alibi(slopes: torch.Tensor, length: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [1, H, T, T]: slope * (key position - query position), and -inf where a query does not see a key.

    With three dimensions, torch's operator for CPUs would not use its fused kernel.
    """
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(length, device=device)
        distances = positions - positions[:, None]
        hidden = ~_visible(length, window, device)
        mask = torch.empty(1, len(slopes), length, length, dtype=dtype, device=device)
        for head, slope in enumerate(slopes.tolist()):
            mask[0, head] = (distances * slope).masked_fill_(hidden, -math.inf)
        return mask


@functools.cache
def alibi_slopes(num_heads: int, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """Return the slopes of ALiBi (arXiv 2108.12409), for BLOOM and MPT: fp32 [num_heads] on the CPU.

    They are 2^(-8 h / n) for head h = 1 .. n, if n = num_heads is a power of two.

    If `ranks` share the heads, return only the num_heads / ranks slopes of `rank`.

    For other head counts, n is the next smaller power of two, and the heads after the first n have the slopes of 2 n
    heads for h = 1, 3, 5 ... (transformers: models/bloom/modeling_bloom.py, models/mpt/modeling_mpt.py).
    Equal arguments give the same tensor, so that all layers share the mask that `_mask` makes from it.
    """
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / n) for head in range(1, n + 1)]
    slopes += [2 ** (-8 * head / (2 * n)) for head in range(1, 2 * (num_heads - n), 2)]
    with torch.inference_mode(False):  # autograd saves no inference tensors
        own_heads = num_heads // ranks
        return torch.tensor(slopes[rank * own_heads:][:own_heads], dtype=torch.float32, device="cpu")
