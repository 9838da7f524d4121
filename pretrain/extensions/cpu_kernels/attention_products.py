"""Causal attention on CPUs in bf16, or with documents, from matrix products, where it is not computed in C.

The operator consists of matrix products that use the CPU's bf16 units. For queries a..b and all keys up to b:
P = softmax(S), S = scale Q K^T with later positions at -inf,  O = P V.
The backward pass recomputes P (FlashAttention, arXiv 2205.14135, algorithm 4, with complete rows instead of tiles):
dV = P^T dO,  dS = P * (dO V^T - rowsum(P * dO V^T)),  dQ = scale dS K,  dK = scale dS^T Q.
With a window, the keys before the window of query a are skipped. Soft-capping is S = cap tanh(scale Q K^T / cap), so
that dS is multiplied by 1 - tanh^2. ALiBi (arXiv 2108.12409) adds slope * (key position - query position) to S.
With documents, the keys before the document of query a are skipped, and the keys of other documents are at -inf.

The tiles of torch's operator (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp) are too small for these units.
Measured on an AVX512_BF16 core with 8 heads of size 64, forward and backward: 0.5 of the time of torch's operator at
512 positions, and 0.8 of it at 2,048 positions.

Shapes: B batch, T positions, H query heads, K key/value heads, E elements per head.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.extensions.cpu_kernels.memory import ATTENTION_ROWS, CPU_SCORES
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.torch_attention import AttentionKernel


class AttentionByProducts(AttentionKernel):
    """Attention in bf16, or with documents, without dropout. Saves only its inputs for the backward pass."""

    def attend(self, q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, *, dropout: float = 0.0,
               scale: float = 0.0, window: int = 0, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
               documents: Documents | None = None) -> torch.Tensor:
        """Return [B, H, T, E]."""
        if documents is not None and documents.are_whole_samples:
            documents = None
        scores = Scores(scale or 1 / math.sqrt(q_BHTE.shape[-1]), window, softcap, alibi_slopes, documents)
        out: torch.Tensor = _CausalAttention.apply(q_BHTE, k_BKTE, v_BKTE, scores)
        return out


@dataclass(frozen=True)
class Scores:
    """How the scores are computed from queries and keys: see AttentionSettings; `scale` is the factor itself."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    documents: Documents | None = None

    def parts(self, q_BHTE: torch.Tensor) -> "list[tuple[slice, list[_Block]]]":
        """Divide the batch into parts, and the queries of each part into blocks."""
        batch, length = q_BHTE.shape[0], q_BHTE.shape[2]
        if self.documents is not None:
            return [(slice(sample, sample + 1),
                     [_Block(block.rows, self._seen(block.rows, block.first_key), block.starts) for block in blocks])
                    for sample, blocks in enumerate(self.documents.row_blocks(ATTENTION_ROWS))]
        rows = [slice(start, min(start + ATTENTION_ROWS, length)) for start in range(0, length, ATTENTION_ROWS)]
        blocks = [_Block(each, self._seen(each, 0)) for each in rows]
        step = max(1, CPU_SCORES * torch.get_num_threads() // (q_BHTE.shape[1] * ATTENTION_ROWS * length))
        return [(slice(start, start + step), blocks) for start in range(0, batch, step)]

    def _seen(self, rows: slice, first_key: int) -> slice:
        return slice(max(first_key, rows.start - self.window + 1) if self.window else first_key, rows.stop)


@dataclass(frozen=True)
class _Block:
    """Queries that are computed together."""

    rows: slice
    seen: slice  # keys that at least one of the queries sees
    starts: tuple[int, ...] = ()  # documents begin here, after the first of the queries


class _CausalAttention(torch.autograd.Function):
    """Shapes: S keys that a block sees, N = B * K, R = rows * H / K: rows of a key/value head's query heads."""

    @staticmethod
    def forward(ctx: FunctionCtx, q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor,
                scores: Scores) -> torch.Tensor:
        ctx.save_for_backward(q_BHTE, k_BKTE, v_BKTE)
        ctx.scores = scores  # type: ignore[attr-defined]
        out_BHTE = _empty_heads_last(q_BHTE)
        masks = _Masks(scores, q_BHTE)
        for part, blocks in scores.parts(q_BHTE):
            q, k_NSE, v_NSE, out = q_BHTE[part], k_BKTE[part].flatten(0, 1), v_BKTE[part].flatten(0, 1), out_BHTE[part]
            for block in blocks:
                rows, seen = block.rows, block.seen
                p_NRS, _ = _probabilities(_rows(q, rows, k_NSE), k_NSE[:, seen], scores, masks, block)
                out[:, :, rows] = _unrows(torch.bmm(p_NRS, v_NSE[:, seen]), out, rows)
        return out_BHTE

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_BHTE,) = grads
        q_BHTE, k_BKTE, v_BKTE = ctx.saved_tensors  # type: ignore[attr-defined]
        scores: Scores = ctx.scores  # type: ignore[attr-defined]
        masks = _Masks(scores, q_BHTE)
        dq_BHTE, dk_BKTE, dv_BKTE = map(_empty_heads_last, (q_BHTE, k_BKTE, v_BKTE))
        for part, blocks in scores.parts(q_BHTE):
            inputs = (q_BHTE[part], k_BKTE[part], v_BKTE[part], grad_BHTE[part])
            dk_BKTE[part], dv_BKTE[part] = _backward_of_part(*inputs, dq_BHTE[part], scores, masks, blocks)
        return dq_BHTE, dk_BKTE, dv_BKTE, None


def _backward_of_part(q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, grad_BHTE: torch.Tensor,
                      dq_BHTE: torch.Tensor, scores: Scores, masks: "_Masks",
                      blocks: list[_Block]) -> tuple[torch.Tensor, torch.Tensor]:
    """Write dq in place; return dk and dv in fp32, summed over the blocks of rows."""
    k_NSE, v_NSE = k_BKTE.flatten(0, 1), v_BKTE.flatten(0, 1)
    dk_NSE, dv_NSE = (torch.zeros(k_NSE.shape, dtype=torch.promote_types(k_NSE.dtype, torch.float32)) for _ in range(2))
    for block in blocks:
        rows, seen = block.rows, block.seen
        q_NRE, grad_NRE = _rows(q_BHTE, rows, k_NSE), _rows(grad_BHTE, rows, k_NSE)
        p_NRS, tanh_NRS = _probabilities(q_NRE, k_NSE[:, seen], scores, masks, block)
        dv_NSE[:, seen] += torch.bmm(p_NRS.transpose(1, 2), grad_NRE)
        dp_NRS = torch.bmm(grad_NRE, v_NSE[:, seen].transpose(1, 2))
        ds_NRS = torch._softmax_backward_data(dp_NRS, p_NRS, -1, p_NRS.dtype)
        if tanh_NRS is not None:
            ds_NRS.mul_(tanh_NRS.square_().neg_().add_(1))
        dq_BHTE[:, :, rows] = _unrows(_scaled_bmm(ds_NRS, k_NSE[:, seen], scores.scale), dq_BHTE, rows)
        dk_NSE[:, seen] += _scaled_bmm(ds_NRS.transpose(1, 2), q_NRE, scores.scale)
    return dk_NSE.view(k_BKTE.shape), dv_NSE.view(v_BKTE.shape)


def _probabilities(q_NRE: torch.Tensor, k_NSE: torch.Tensor, scores: Scores, masks: "_Masks",
                   block: _Block) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return P [N, R, S], and with soft-capping the tanh. The softmax is computed in fp32."""
    tanh_NRS = None
    if scores.softcap:
        tanh_NRS = _scaled_bmm(q_NRE, k_NSE.transpose(1, 2), scores.scale / scores.softcap).tanh_()
        scores_NRS = tanh_NRS * scores.softcap
    else:
        scores_NRS = _scaled_bmm(q_NRE, k_NSE.transpose(1, 2), scores.scale)
    masks.add_to(scores_NRS, block)
    return torch.softmax(scores_NRS, dim=-1), tanh_NRS


class _Masks:
    """Terms that are added to a block's scores: -inf for positions that a query does not see, and ALiBi."""

    def __init__(self, scores: Scores, q_BHTE: torch.Tensor) -> None:
        self.scores = scores
        self.later = torch.full((ATTENTION_ROWS, ATTENTION_ROWS), -math.inf, dtype=q_BHTE.dtype).triu(1)
        if scores.window:
            self.earlier = torch.full((ATTENTION_ROWS, ATTENTION_ROWS), -math.inf, dtype=q_BHTE.dtype).tril(-1)
        if scores.alibi_slopes is not None:
            # [H, queries of a block, keys]: the columns are key positions minus the position of the first query
            self.earliest = -min(q_BHTE.shape[2], scores.window or q_BHTE.shape[2])
            distances = torch.arange(self.earliest, ATTENTION_ROWS) - torch.arange(ATTENTION_ROWS)[:, None]
            self.alibi_HRS = torch.stack([(slope * distances).to(q_BHTE.dtype)
                                          for slope in scores.alibi_slopes.to("cpu", torch.float64).unbind()])

    def add_to(self, scores_NRS: torch.Tensor, block: _Block) -> None:
        """Add to the scores of the queries and the keys of a block, in place."""
        rows, seen = block.rows, block.seen
        count = rows.stop - rows.start
        scores_NHRS = scores_NRS.unflatten(1, (-1, count))
        scores_NHRS[..., rows.start - seen.start :] += self.later[:count, :count]
        if self.scores.window:  # query rows.start + i does not see the first i keys of the window of rows.start
            cut = seen.start - (rows.start - self.scores.window + 1)  # keys of that window before `seen`
            scores_NHRS[..., : max(0, count - cut)] += self.earlier[:count, cut:count]
        if self.scores.alibi_slopes is not None:
            columns = slice(seen.start - rows.start - self.earliest, count - self.earliest)
            scores_NRS.view(-1, len(self.alibi_HRS), count, scores_NRS.shape[-1]).add_(
                self.alibi_HRS[:, :count, columns])
        for start, stop in itertools.pairwise((*block.starts, rows.stop)):  # a document in these queries
            scores_NHRS[:, :, start - rows.start : stop - rows.start, : start - seen.start] = -math.inf


def _scaled_bmm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * a @ b, scaled before rounding."""
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)


def _rows(x_BHTE: torch.Tensor, rows: slice, k_NSE: torch.Tensor) -> torch.Tensor:
    """Return [N, R, E]: the rows of all query heads that share a key/value head, one head after the other."""
    return x_BHTE[:, :, rows].reshape(k_NSE.shape[0], -1, x_BHTE.shape[-1])


def _unrows(y_NRE: torch.Tensor, like_BHTE: torch.Tensor, rows: slice) -> torch.Tensor:
    """Invert `_rows`: return [B, H, rows, E]."""
    batch, heads, _, size = like_BHTE.shape
    return y_NRE.view(batch, heads, rows.stop - rows.start, size)


def _empty_heads_last(x_BHTE: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized [B, H, T, E] in the memory order [B, T, H, E], so that projections need no copy."""
    return torch.empty_like(x_BHTE.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
