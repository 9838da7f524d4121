"""Causal attention with documents, windows, ALiBi or soft-capping as one fused kernel on CUDA: torch's flex_attention.

F.scaled_dot_product_attention has no fused kernel for soft-capping, and needs a mask [T, T] for the others, which its
flash kernel does not take. flex_attention (arXiv 2412.05496) compiles a kernel for the formula of the scores. It skips
the blocks of keys that no query of a block sees, so that a sample of short documents costs less than a long one.

The visible keys of a query are consecutive: from `first` to the query itself. The table of blocks follows from `first`
on the device, without a mask [T, T] and without waiting for the device.

Shapes: B batch, T positions, H query heads, K key/value heads, E elements per head, N = T / BLOCK blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from pretrain.model import attention_memory
from pretrain.model.attention_memory import FLEX_BLOCK as BLOCK
from pretrain.model.kernels.documents import Documents, first_keys

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_Mod = Callable[..., torch.Tensor]


def why_not_flex(q_BHTE: torch.Tensor, *, dropout: float, on_cuda: bool) -> str:
    """Return why the kernel cannot compute this attention; "" if it can."""
    if not on_cuda:
        return "the device is not CUDA"
    if not has_triton():
        return "the package triton is missing, or does not support this GPU"
    precision = _PRECISIONS.get(q_BHTE.dtype, "fp32")
    return attention_memory.why_not_flex(precision=precision, head_size=q_BHTE.shape[3], seq_length=q_BHTE.shape[2],
                                          dropout=dropout) or _Failure.reason


class _Failure:
    """Holds why the kernel failed in its test on this machine (engine/chosen_operators.py)."""

    reason = ""


def reject_flex(reason: str) -> None:
    """Use torch's other operators from now on; "" allows the kernel again."""
    _Failure.reason = reason


@functools.cache
def has_triton() -> bool:
    """Return whether torch.compile can make kernels for this GPU."""
    from torch.utils._triton import has_triton as torch_has_triton

    return bool(torch_has_triton())


# As in torch_attention.py: a call in a compiled block is a constant of its graph. torch 2.13 traces the function that
# a cache holds.
setattr(has_triton.__wrapped__, "_dynamo_marked_constant", True)  # noqa: B010 (mypy knows no such attribute)


def flex_causal_attention(q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, scale: float,
                          window: int, softcap: float, alibi_slopes: torch.Tensor | None,
                          documents: Documents | None) -> torch.Tensor:
    """Return [B, H, T, E]. See AttentionSettings in torch_attention.py for the arguments; `scale` is the factor itself.

    Saved for the backward pass: q, k, v, the output and the logarithms of the softmax sums.
    """
    mask = block_mask(q_BHTE.shape[2], q_BHTE.device, window, documents)
    slopes = None if alibi_slopes is None else _slopes_on(alibi_slopes, q_BHTE.device)
    operator = _operator() if torch.compiler.is_compiling() else _compiled_operator()
    out: torch.Tensor = operator(q_BHTE, k_BKTE, v_BKTE, score_mod=score_function(softcap, slopes), block_mask=mask,
                                 scale=scale, enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1])
    return out


def score_function(softcap: float, slopes_H: torch.Tensor | None) -> _Mod | None:
    """Return the function of a scaled score, or None if it remains as it is: soft-capping, then ALiBi."""
    if not softcap and slopes_H is None:
        return None

    def score(score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor,
              key: torch.Tensor) -> torch.Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes_H is None else score + slopes_H[head] * (key - query)

    return score


def block_mask(length: int, device: torch.device, window: int, documents: Documents | None) -> Any:
    """Return the BlockMask of a micro-batch with documents, made once for all layers, or the mask of every sample."""
    if documents is None and torch.compiler.is_compiling():  # no caches there; it costs a few operations on [N, N]
        return make_block_mask(first_keys(torch.arange(length, device=device)[None], window))
    if documents is None:
        return _shared_block_mask(length, device, window)
    if window not in documents.block_masks:
        documents.block_masks[window] = make_block_mask(first_keys(documents.positions_BT, window))
    return documents.block_masks[window]


def make_block_mask(first_BT: torch.Tensor) -> Any:
    """Return the BlockMask of queries that see the keys from `first` to themselves.

    A block of queries needs the blocks of keys from the smallest of its first keys to its own block. All of its queries
    see all keys of a block if the block begins at the largest of the first keys or later, and is not its own.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first_BNR = first_BT.unflatten(1, (-1, BLOCK))
    blocks_N = torch.arange(first_BNR.shape[1], device=first_BT.device)
    begin_N, queries_N1 = blocks_N * BLOCK, blocks_N[:, None]
    needed_BNN = (blocks_N + 1) * BLOCK > first_BNR.amin(2)[..., None]
    complete_BNN = (begin_N >= first_BNR.amax(2)[..., None]) & (blocks_N < queries_N1)
    partial_BNN = needed_BNN & ~complete_BNN & (blocks_N <= queries_N1)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= first_BT[batch if len(first_BT) > 1 else batch * 0, query])

    return BlockMask.from_kv_blocks(*_ordered(partial_BNN), *_ordered(complete_BNN), BLOCK_SIZE=BLOCK,
                                    mask_mod=visible)


def _ordered(blocks_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers [B, 1, N] and the indices [B, 1, N, N] of the key blocks that are True, which come first."""
    blocks_B1NN = blocks_BNN[:, None]
    indices = blocks_B1NN.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_B1NN.sum(-1, dtype=torch.int32), indices.int().contiguous()


@functools.lru_cache(maxsize=4)
def _shared_block_mask(length: int, device: torch.device, window: int) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        return make_block_mask(first_keys(torch.arange(length, device=device)[None], window))


@functools.lru_cache(maxsize=4)
def _slopes_on(slopes_H: torch.Tensor, device: torch.device) -> torch.Tensor:
    return slopes_H.to(device)


setattr(_slopes_on, "_dynamo_marked_constant", True)  # noqa: B010 (mypy knows no such attribute)


def _operator() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled_operator() -> Callable[..., Any]:
    """Return flex_attention as one kernel; without a compiler it would compute all scores."""
    compiled: Callable[..., Any] = torch.compile(_operator(), dynamic=False)
    return compiled
