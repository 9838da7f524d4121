"""Bytes that attention saves for its backward pass, and that the backward pass needs. Imports no torch.

See operator_memory.py for the other operators, how the bytes were found, and the letters in shapes. On CUDA, flash
attention saves q, k, v, its output and the logarithm of each softmax sum. With Ulysses, the attention and `out` save
its output before and after its exchange.
"""

from pretrain.model.attention_on_cuda import has_flash, why_not_flex
from pretrain.model.description import ModelConfig
from pretrain.model.operator_memory import (
    ATTENTION_ROWS,
    CPU_SCORES,
    FP32,
    INT64,
    MicroBatch,
    column_input_bytes,
    linear_saved,
    norm_of_rows_saved,
    qkv_bytes,
    qkv_width,
    query_width,
    recomputes_norms,
    uses_c_norm,
)


def uses_flex(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether flex_attention computes documents, windows, ALiBi and soft-capping: it needs no mask [T, T]."""
    precision = "fp32" if batch.element_bytes == FP32 else "bf16"
    return batch.cuda and not batch.plain and not why_not_flex(
        precision=precision, head_size=config.head_size, seq_length=batch.seq_length, dropout=config.attention_dropout)


def attention_saved(config: ModelConfig, batch: MicroBatch, window: int = 0) -> int:
    """Bytes that causal attention saves, without its norm: the inputs of `qkv`, of the attention core, of `out`.

    The input of `qkv` is not saved if it is recomputed.

    Args:
        window: number of latest tokens that a query sees; 0: all.
    """
    output = linear_saved(query_width(config, batch), batch)
    if uses_c_attention(config, batch):
        log_sums = batch.tokens * config.num_heads // batch.tensor_parallel_size * FP32
        inputs = 2 if _qk_norm_keeps_input(config, batch) else 1  # the normalised ones, and the output of `qkv`
        core = inputs * qkv_bytes(config, batch) + log_sums + output
        core += output if batch.sequence_parallel_size > 1 else 0
    elif uses_cpu_attention(config, batch):
        core = _qkv_saved(config, batch) + output
    elif config.attention_softcap and not uses_flex(config, batch):
        core = _capped_attention_saved(config, batch) + output
    elif not batch.cuda and config.attention_dropout:
        core = _unfused_attention_saved(config, batch) + output
    else:
        core = _fused_attention_saved(config, batch, window)
    qkv_input = 0 if recomputes_norms(config, batch) else column_input_bytes(config, batch)
    return qkv_input + _qk_norm_saved(config, batch) + core


def _qk_norm_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that the norms of queries and keys save. Their inputs are views of the output of `qkv`."""
    if not config.qk_norm:
        return 0
    total = 0
    for heads in (config.num_heads, config.num_kv_heads):
        own_heads = heads // batch.tensor_parallel_size
        rows, size = (own_heads, config.head_size) if config.qk_norm == "head" else (1, own_heads * config.head_size)
        if config.qk_norm == "all" and batch.tensor_parallel_size > 1:  # layers/norm.py, SplitNorm, in fp32
            tensors = 1 if batch.element_bytes == FP32 else 2  # the norm before its weight, and the input
            total += batch.tokens * (tensors * size + 1) * FP32
            continue
        total += norm_of_rows_saved(config, batch, rows, size, shared_input=True)
    return total


def uses_cpu_attention(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether a custom operator computes the attention, in C or not: on CPUs in bf16 without dropout."""
    return not (batch.cuda or batch.plain or batch.fp16 or config.attention_dropout) and batch.element_bytes == 2


def uses_c_attention(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether model/kernels/cpu/attention.py computes the attention, which rotates q and k itself."""
    return batch.c_attention and uses_cpu_attention(config, batch)


def _qkv_saved(config: ModelConfig, batch: MicroBatch, *, all_heads: bool = False) -> int:
    """Bytes of q, k and v, which are views of the output of `qkv`, or new tensors.

    Rotation (RoPE) makes new tensors of q and k; the output of `qkv` remains allocated, as v is still a view of it.

    Args:
        all_heads: the operator takes k and v with as many heads as q, which are new tensors if there were fewer.
    """
    heads, kv_heads, rope = config.num_heads, config.num_kv_heads, config.position == "rope"
    repeated = all_heads and kv_heads < heads
    new_heads = (heads if rope else 0) + (2 * heads if repeated else kv_heads if rope else 0)
    has_views = not (rope and repeated) or _qk_norm_keeps_input(config, batch)
    new = new_heads * config.head_size // batch.tensor_parallel_size
    return batch.tokens * (new + (qkv_width(config, batch) if has_views else 0)) * batch.element_bytes


def _qk_norm_keeps_input(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether the norms of queries and keys save views of the output of `qkv`, instead of an fp32 copy."""
    converts = batch.element_bytes != FP32 and (config.norm_offset or not batch.cuda) and not uses_c_norm(config, batch)
    return bool(config.qk_norm) and not converts


def _fused_attention_saved(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes that torch's fused attention saves: q, k, v, the output and fp32 logarithms of the softmax sums [N, H].

    `out` saves the same storage as its input. With RoPE the output has the memory order of the new q, and `out` saves a
    copy, as it does after an exchange between the ranks of a sequence; only torch's efficient kernel on CUDA, for fp32
    and for masks, has an order of its own. With a window, the mask [T, T] is converted to
    the dtype of q and saved (model/kernels/torch_attention.py), unless shared_mask_bytes counts it.
    """
    log_sums = round(batch.tokens * config.num_heads / batch.tensor_parallel_size) * FP32
    has_window, alibi = 0 < window < batch.seq_length, config.position == "alibi"
    documents = batch.documents and batch.cuda  # on CPUs a sample may be a single document, which needs no mask
    if uses_flex(config, batch):
        has_window = alibi = documents = False
    flash = has_flash(precision="fp32" if batch.element_bytes == FP32 else "bf16", head_size=config.head_size)
    is_efficient = batch.cuda and (not flash or has_window or alibi or documents)
    copied = batch.sequence_parallel_size > 1 or (config.position == "rope" and not is_efficient)
    outputs = 2 if copied else 1
    mask = batch.seq_length**2 * batch.element_bytes if has_window and not alibi and not documents else 0
    return _qkv_saved(config, batch, all_heads=has_window or alibi or documents or is_efficient) + log_sums + mask \
        + outputs * linear_saved(query_width(config, batch), batch)


def _capped_attention_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that attention with soft-capping saves, for which torch has no fused kernel.

    These are q, k and v of all heads, a mask [T, T], and for each score: the tanh, the softmax in fp32, and the input
    of the product with v, which is the softmax itself in fp32 without dropout. Dropout adds its mask.
    """
    size, dropout = batch.element_bytes, config.attention_dropout > 0
    per_score = size + FP32 + (size if size != FP32 or dropout else 0) + (batch.mask_bytes if dropout else 0)
    scores = round(batch.tokens * batch.seq_length * config.num_heads / batch.tensor_parallel_size)
    mask = 0 if batch.documents else batch.seq_length**2
    return _qkv_saved(config, batch, all_heads=True) + scores * per_score + mask


def _unfused_attention_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that attention with dropout saves on a CPU, where torch has no fused kernel for it.

    These are q, k and v of all heads in fp32, and three fp32 tensors [H, N, T]: softmax, noise and their product.
    """
    heads = config.num_heads / batch.tensor_parallel_size
    inputs = qkv_bytes(config, batch) if _qk_norm_keeps_input(config, batch) else 0
    return inputs + round(batch.tokens * heads * (3 * config.head_size + 3 * batch.seq_length) * FP32)


def attention_backward(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes of gradients and working memory in attention's backward pass.

    The peak is the larger of two sums: the gradients of the output and of q, k and v with the kernel's working memory,
    or the gradients of q, k and v twice, while they are concatenated for `qkv`. The exchange between the ranks of a
    sequence has them three times: before, after, and in the order of `qkv`. With soft-capping, or with dropout on a
    CPU, torch has no fused kernel. The peak is then a gradient [H, N, T] in fp32, or two of them without dropout.
    """
    scores = round(batch.tokens * batch.seq_length * config.num_heads / batch.tensor_parallel_size) * FP32
    if config.attention_softcap and not (uses_cpu_attention(config, batch) or uses_flex(config, batch)):
        return scores if config.attention_dropout else 2 * scores
    if not batch.cuda and config.attention_dropout:
        return scores
    qkv = qkv_bytes(config, batch)
    exchanged = 3 * qkv if batch.sequence_parallel_size > 1 else 0
    if uses_c_attention(config, batch):  # with norms of q and k, their gradients are concatenated
        return max(linear_saved(query_width(config, batch), batch) + qkv, 2 * qkv if config.qk_norm else 0, exchanged)
    uses_rows = uses_cpu_attention(config, batch) or (batch.documents and not batch.cuda)
    work = _cpu_attention_work(config, batch, window) if uses_rows else 0
    return max(linear_saved(query_width(config, batch), batch) + qkv + work, 2 * qkv, exchanged)


def _cpu_attention_work(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes of working memory in the backward pass of model/kernels/cpu_attention.py.

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


def shared_mask_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the attention masks that model/kernels/torch_attention.py makes once for all blocks of a rank.

    These are [T, T] of one byte for each size of a window (0 is a size with soft-capping), and [H, T, T] for ALiBi.
    """
    if uses_cpu_attention(config, batch) or uses_flex(config, batch):
        return 0
    windows = {window for window in config.windows or (0,) if 0 < window < batch.seq_length or config.attention_softcap}
    windows = set() if batch.documents and batch.cuda else windows  # document_bytes counts them
    alibi = config.num_heads // batch.head_ranks * batch.element_bytes if config.position == "alibi" else 0
    return batch.seq_length**2 * (len(windows or {0} if alibi else windows) + alibi)


def document_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that --document_attention needs for each micro-batch until its backward pass, once for all blocks.

    These are the positions int64 [samples, T], the rotary tables for them, and where torch's operators compute the
    attention, the masks: [samples, T, T] in the dtype of q for each size of a window, with ALiBi [samples, H, T, T].
    """
    if not batch.documents:
        return 0
    ropes = 1 if len(set(config.windows)) < 2 else 2  # layers with a window may have frequencies of their own
    tokens = batch.tokens * batch.sequence_parallel_size  # these tensors are not divided
    tables = ropes * tokens * config.rotary_size * batch.element_bytes
    masks = 0
    if (batch.cuda and not uses_flex(config, batch)) or config.attention_dropout:
        windows = {window if window < batch.seq_length else 0 for window in config.windows or (0,)}
        heads = config.num_heads // batch.head_ranks if config.position == "alibi" else 1
        masks = batch.samples * heads * batch.seq_length**2 * batch.element_bytes * len(windows)
    return tokens * INT64 + tables + masks
