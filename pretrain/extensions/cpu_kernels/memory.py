"""Bytes that the kernels for CPUs keep and allocate: what kernels.py offers, in the same cases. Imports no torch.

See pretrain/model/operator_memory.py for the formulas of torch's operators, and for how the bytes were found.
"""

import functools
from typing import TYPE_CHECKING

from pretrain.distributed.device import cpuinfo
from pretrain.model.attention_memory import qk_norm_keeps_input, qkv_saved, torch_attention_memory
from pretrain.model.description import ModelConfig
from pretrain.model.operator_memory import (
    FP32,
    AttentionMemory,
    LossMemory,
    MicroBatch,
    NormMemory,
    OperatorMemory,
    UpdateMemory,
    linear_saved,
    qkv_bytes,
    query_width,
)

if TYPE_CHECKING:
    from pretrain.config.layout import Layout

# sizes by which attention_products.py divides the work, so that the scores stay in the cache
CPU_SCORES = 2**20  # attention scores that a CPU thread holds at a time
ATTENTION_ROWS = 128  # queries of a block; keys later than the block are skipped

# elements of the gradients that gradient_passes.py converts to fp32 at a time; Adam's kernel rounds the last elements
# otherwise if their number is no multiple of 128, so that this one gives the bits of a single piece
PIECE_ELEMENTS = 2**20


@functools.cache
def multiplies_bf16() -> bool:
    """Return whether this CPU has AVX512_BF16, with which attention in bf16 is computed in C."""
    return "avx512_bf16" in cpuinfo()


class CpuMemory(OperatorMemory):
    """Memory of the kernels, as if all families were in C, apart from attention on CPUs without its dot products."""

    def norm(self, config: ModelConfig, batch: MicroBatch, rows: int, size: int) -> NormMemory | None:
        """Return that a norm in bf16, or an RMSNorm in fp32, saves its input alone."""
        is_in_c = not (batch.cuda or batch.plain or batch.fp16) and (
            batch.element_bytes != FP32 or config.norm == "rmsnorm")
        return NormMemory(0, is_recomputed=True) if is_in_c else None

    def attention(self, config: ModelConfig, batch: MicroBatch, window: int) -> AttentionMemory | None:
        """Return what attention in bf16 needs, and in other precisions attention with documents."""
        if batch.cuda or batch.plain or config.attention_dropout:
            return None
        if batch.element_bytes != 2 or batch.fp16:
            return _with_documents(config, batch, window) if batch.documents else None
        output, qkv = linear_saved(query_width(config, batch), batch), qkv_bytes(config, batch)
        exchanged = 3 * qkv if batch.sequence_parallel_size > 1 else 0
        if not multiplies_bf16():
            work = _work_of_products(config, batch, window)
            return AttentionMemory(qkv_saved(config, batch) + output, max(output + qkv + work, 2 * qkv, exchanged),
                                   saves_output=False, needs_masks=False, needs_document_masks=False)
        # attention_in_c.py rotates q and k itself, and saves its inputs and output. After norms of q and k, it gets
        # these instead of the output of `qkv`, and their gradients are concatenated
        inputs = 2 if qk_norm_keeps_input(config, batch) else 1
        log_sums = batch.tokens * config.num_heads // batch.tensor_parallel_size * FP32
        saved = inputs * qkv + log_sums + (2 if batch.sequence_parallel_size > 1 else 1) * output
        return AttentionMemory(saved, max(output + qkv, 2 * qkv if config.qk_norm else 0, exchanged),
                               needs_masks=False, needs_document_masks=False)

    def loss(self, config: ModelConfig, batch: MicroBatch) -> LossMemory | None:
        """Return that the softmax needs no memory, and that the gradient of the matrix needs a transposed copy."""
        is_in_c = not (batch.cuda or batch.fp16 or config.logit_softcap) and batch.tensor_parallel_size == 1
        return LossMemory(0, copies=2) if is_in_c else None

    def update(self, layout: "Layout") -> UpdateMemory | None:
        """Return what gradient_passes.py converts: DeepSpeed's Adam is given pieces of the gradients."""
        if layout.device_kind != "cpu" or layout.precision == "fp16" or layout.masters_in_16bit:
            return None
        in_pieces = layout.optimizer in ("adam", "adamw") and not layout.torch_optimizer
        return UpdateMemory(is_one_pass=layout.precision == "bf16" and layout.optimizer != "muon",
                            most_elements=PIECE_ELEMENTS if in_pieces else None)


def _with_documents(config: ModelConfig, batch: MicroBatch, window: int) -> AttentionMemory:
    """Return the larger of what a sample with documents needs, and a sample of one document, which torch computes."""
    by_torch = torch_attention_memory(config, batch, window)
    if config.attention_softcap:
        return AttentionMemory(by_torch.saved, by_torch.backward, needs_document_masks=False)
    qkv = qkv_bytes(config, batch)
    of_products = linear_saved(query_width(config, batch), batch) + qkv + _work_of_products(config, batch, window)
    return AttentionMemory(by_torch.saved, max(by_torch.backward, of_products), needs_document_masks=False)


def _work_of_products(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes of working memory in the backward pass of attention_products.py.

    The kernel processes as many samples at once as have CPU_SCORES scores, in blocks of ATTENTION_ROWS queries. It
    holds k and v in the order of heads, their gradients in fp32, a block's queries and output gradients, and several
    tensors [H, rows, S] for the S keys that the block sees: scores, probabilities and their gradients, and with
    soft-capping the tanh. At the peak one of two more tensors exists: the previous block's scores (`previous` is that
    block's length as a fraction of S), or the product that is added to the gradient of k. ALiBi is a tensor
    [H, rows, T + rows].
    """
    heads, kv_heads = config.num_heads / batch.head_ranks, config.num_kv_heads / batch.head_ranks
    samples = min(batch.samples, max(1, int(CPU_SCORES // (heads * ATTENTION_ROWS * batch.seq_length))))
    length = batch.seq_length
    seen = min(length, window + ATTENTION_ROWS - 1) if window else length
    rows, previous = min(ATTENTION_ROWS, length), min(1.0, max(0, length - ATTENTION_ROWS) / seen)
    keys, seen_keys = kv_heads * length * config.head_size, kv_heads * seen * config.head_size
    scores, tanh = heads * rows * seen, 1 if config.attention_softcap else 0
    scores = max((3 + tanh + previous) * scores, (2 + tanh + (3 + tanh) * previous) * scores,
                 (3 + tanh) * scores + seen_keys)
    queries = 2 * heads * rows * config.head_size
    alibi = heads * ATTENTION_ROWS * (length + ATTENTION_ROWS) if config.position == "alibi" else 0
    return round(samples * ((scores + queries + 2 * keys) * batch.element_bytes + 2 * keys * FP32)) \
        + round(alibi + ATTENTION_ROWS**2) * batch.element_bytes
