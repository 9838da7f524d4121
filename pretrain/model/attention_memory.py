"""Bytes that attention needs for its backward pass, and the operator that computes it on CUDA. Imports no torch.

See operator_memory.py for the other operators, how the bytes were found, and the letters in shapes. On CUDA, flash
attention saves q, k, v, its output and the logarithm of each softmax sum. With Ulysses, the attention and `out` save
its output before and after its exchange.
"""

from dataclasses import replace

from pretrain.model.description import ModelConfig
from pretrain.model.operator_memory import (
    FP32,
    INT64,
    AttentionMemory,
    MicroBatch,
    column_input_bytes,
    linear_saved,
    norm_memory,
    norm_of_rows_saved,
    offered,
    qkv_bytes,
    qkv_width,
    query_width,
    recomputes_norms,
)

FLEX_BLOCK = 128  # queries and keys; the default of flex_attention, whose kernels divide it
_LARGEST_HEAD = 256  # elements; of torch's flash kernel too


def why_not_flex(*, precision: str, head_size: int, seq_length: int, dropout: float) -> str:
    """Return why flex_attention.py cannot compute an attention on CUDA; "" if it can."""
    if dropout:
        return "attention dropout"
    if precision not in ("bf16", "fp16"):
        return f"{precision} instead of bf16 or fp16"
    if seq_length % FLEX_BLOCK:
        return f"a sequence of {seq_length} tokens, not a multiple of {FLEX_BLOCK}"
    if not 16 <= head_size <= _LARGEST_HEAD or head_size & (head_size - 1):
        return f"heads of {head_size} elements, not a power of 2 from 16 to {_LARGEST_HEAD}"
    return ""


def has_flash(*, precision: str, head_size: int) -> bool:
    """Return whether torch's flash kernel computes attention without a mask."""
    return precision != "fp32" and head_size <= _LARGEST_HEAD


def expected_operator(*, precision: str, head_size: int, seq_length: int, dropout: float, special: bool,
                      softcap: bool, plain: bool) -> str:
    """Describe the operator that a run on CUDA will probably use; the run itself asks torch, and reports the answer.

    Args:
        special: scores with documents, a window, ALiBi or soft-capping.
        softcap: scores with soft-capping.
        plain: the custom kernels are disabled.
    """
    if not special:
        if precision == "fp32":
            return "torch's efficient kernel: the flash kernel needs bf16 or fp16"
        if head_size > _LARGEST_HEAD:
            return f"torch's efficient kernel: the flash kernel takes heads of up to {_LARGEST_HEAD} elements"
        return "torch's flash or cuDNN kernel"
    reason = why_not_flex(precision=precision, head_size=head_size, seq_length=seq_length, dropout=dropout)
    if plain:
        reason = "--plain_operators"
    if not reason:
        return "flex_attention, a fused kernel that triton compiles"
    operators = "separate operators" if softcap else "torch's efficient kernel with a mask"
    return f"{operators}, not flex_attention: {reason}"


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
    qkv_input = 0 if recomputes_norms(config, batch) else column_input_bytes(config, batch)
    return qkv_input + _qk_norm_saved(config, batch) + attention_memory(config, batch, window).saved


def attention_memory(config: ModelConfig, batch: MicroBatch, window: int = 0) -> AttentionMemory:
    """Return what the attention core needs."""
    found = offered(lambda memory: memory.attention(config, batch, window))
    return torch_attention_memory(config, batch, window) if found is None else found


def torch_attention_memory(config: ModelConfig, batch: MicroBatch, window: int) -> AttentionMemory:
    """Return what torch's operators need.

    The peak of the backward pass is the larger of two sums: the gradients of the output and of q, k and v, or the
    gradients of q, k and v twice, while they are concatenated for `qkv`. The exchange between the ranks of a sequence
    has them three times: before, after, and in the order of `qkv`. With soft-capping, or with dropout on a CPU, torch
    has no fused kernel. The peak is then a gradient [H, N, T] in fp32, or two of them without dropout.
    """
    output = linear_saved(query_width(config, batch), batch)
    scores = round(batch.tokens * batch.seq_length * config.num_heads / batch.tensor_parallel_size) * FP32
    flex = uses_flex(config, batch)
    if config.attention_softcap and not flex:
        return AttentionMemory(_capped_attention_saved(config, batch) + output,
                               scores if config.attention_dropout else 2 * scores)
    if not batch.cuda and config.attention_dropout:
        return AttentionMemory(_unfused_attention_saved(config, batch) + output, scores)
    qkv = qkv_bytes(config, batch)
    exchanged = 3 * qkv if batch.sequence_parallel_size > 1 else 0
    return AttentionMemory(_fused_attention_saved(config, batch, window), max(output + qkv, 2 * qkv, exchanged),
                           needs_masks=not flex, needs_document_masks=not flex)


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


def qkv_saved(config: ModelConfig, batch: MicroBatch, *, all_heads: bool = False) -> int:
    """Bytes of q, k and v, which are views of the output of `qkv`, or new tensors.

    Rotation (RoPE) makes new tensors of q and k; the output of `qkv` remains allocated, as v is still a view of it.

    Args:
        all_heads: the operator takes k and v with as many heads as q, which are new tensors if there were fewer.
    """
    heads, kv_heads, rope = config.num_heads, config.num_kv_heads, config.position == "rope"
    repeated = all_heads and kv_heads < heads
    new_heads = (heads if rope else 0) + (2 * heads if repeated else kv_heads if rope else 0)
    has_views = not (rope and repeated) or qk_norm_keeps_input(config, batch)
    new = new_heads * config.head_size // batch.tensor_parallel_size
    return batch.tokens * (new + (qkv_width(config, batch) if has_views else 0)) * batch.element_bytes


def qk_norm_keeps_input(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether the norms of queries and keys save views of the output of `qkv`, instead of an fp32 copy."""
    return bool(config.qk_norm) and norm_memory(config, replace(batch, compiled=False)).keeps_input


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
    return qkv_saved(config, batch, all_heads=has_window or alibi or documents or is_efficient) + log_sums + mask \
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
    return qkv_saved(config, batch, all_heads=True) + scores * per_score + mask


def _unfused_attention_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that attention with dropout saves on a CPU, where torch has no fused kernel for it.

    These are q, k and v of all heads in fp32, and three fp32 tensors [H, N, T]: softmax, noise and their product.
    """
    heads = config.num_heads / batch.tensor_parallel_size
    inputs = qkv_bytes(config, batch) if qk_norm_keeps_input(config, batch) else 0
    return inputs + round(batch.tokens * heads * (3 * config.head_size + 3 * batch.seq_length) * FP32)


def shared_mask_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the attention masks that model/kernels/torch_attention.py makes once for all blocks of a rank.

    These are [T, T] of one byte for each size of a window (0 is a size with soft-capping), and [H, T, T] for ALiBi.
    """
    if not attention_memory(config, batch).needs_masks:
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
    if attention_memory(config, batch).needs_document_masks:
        windows = {window if window < batch.seq_length else 0 for window in config.windows or (0,)}
        heads = config.num_heads // batch.head_ranks if config.position == "alibi" else 1
        masks = batch.samples * heads * batch.seq_length**2 * batch.element_bytes * len(windows)
    return tokens * INT64 + tables + masks
