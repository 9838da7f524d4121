"""Bytes that autograd saves for the backward pass: one function for each operator of a block. Imports no torch.

The description of a model (description.py) says which operators there are. layer_memory.py adds them up for a layer.

CPU: measured with `torch.autograd.graph.saved_tensors_hooks` on the real layers, each storage counted once
(tests/memory/estimate/test_activations.py repeats the measurement).
CUDA: derived from torch's formulas, not measured. Flash attention saves q, k, v, its output and the logarithm of each
softmax sum. Dropout saves one byte per element. LayerNorm saves its statistics in fp32. RMSNorm is one kernel, which
saves its input. `--compile_blocks` is ignored, as the compiler chooses what a compiled block saves.

Tensor parallelism: every tensor is divided, by positions between the layers and by heads or columns inside attention
and MLP (Korthikanti et al., arXiv 2205.05198, table 2, "tensor + sequence parallel": s b h 34 / t bytes a layer).
Ulysses (arXiv 2309.14509): every tensor is divided by the ranks of a sequence, by tokens outside attention and by
heads inside; the attention and `out` save the attention's output before and after its exchange. Experts receive
`experts_per_token` times the tokens, evenly (DeepSpeed-MoE with capacity factor 1).

Shapes in docstrings: N tokens of the micro-batch, D hidden_size, F intermediate_size, H heads, E head_size, T
seq_length. Every size is for one rank.
"""

from dataclasses import dataclass, replace

from pretrain.model.description import ModelConfig

# sizes by which model/kernels/cpu_attention.py divides the work, so that the scores stay in the cache
CPU_SCORES = 2**20  # attention scores that a CPU thread holds at a time
ATTENTION_ROWS = 128  # queries of a block; keys later than the block are skipped

# elements of the gradients that engine/gradient_passes.py converts to fp32 at a time; Adam's kernel rounds the last
# elements otherwise if their number is no multiple of 128, so that this one gives the bits of a single piece
PIECE_ELEMENTS = 2**20

FP32, INT64 = 4, 8  # bytes of an element


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on one rank."""

    tokens: int  # on this rank: samples * positions / ranks that share a sequence
    seq_length: int  # positions of a complete sample
    element_bytes: int  # of an activation
    cuda: bool  # whether CUDA kernels compute the activations, or CPU kernels
    tensor_parallel_size: int = 1
    documents: bool = False  # --document_attention
    fp16: bool = False  # on CPUs fp16 uses torch's attention, bf16 uses model/kernels/cpu_attention.py
    sequence_parallel_size: int = 1
    mlp_tiles: int = 1  # pieces in which the MLP is computed and recomputed
    fp8: bool = False  # linear layers multiply in FP8 (model/kernels/fp8.py)
    keeps_norms: bool = False  # linear layers save the norms that they are given even where they could recompute them
    c_attention: bool = False  # on a CPU for which attention in bf16 is in C (model/kernels/cpu/attention.py)

    @property
    def mask_bytes(self) -> int:
        """Bytes of an element of a dropout mask. The CPU saves the scaled noise in the activation's dtype."""
        return 1 if self.cuda else self.element_bytes

    @property
    def shard_tokens(self) -> int:
        """Tokens of this rank between two layers, where tensor-parallel ranks hold shards of the sequences."""
        return -(-self.tokens // self.tensor_parallel_size)

    @property
    def samples(self) -> int:
        """Samples of which this rank has all positions or a shard, at least 1."""
        return max(1, self.tokens * self.sequence_parallel_size // self.seq_length)

    @property
    def head_ranks(self) -> int:
        """Number of ranks among which the attention heads are divided."""
        return self.tensor_parallel_size * self.sequence_parallel_size


def hidden_states_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the tensor [N, D] that one layer passes to the next, or of the shard of it that this rank holds."""
    return batch.shard_tokens * config.hidden_size * batch.element_bytes


def norm_saved(config: ModelConfig, batch: MicroBatch, *, shared_input: bool = False) -> int:
    """Bytes that a norm of [N, D] saves: its input and its statistics.

    Args:
        shared_input: another operator saves the same input, so it is not counted here.
    """
    shard = replace(batch, tokens=batch.shard_tokens)
    return _norm_saved(config, shard, 1, config.hidden_size, shared_input=shared_input)


def _norm_saved(config: ModelConfig, batch: MicroBatch, rows: int, size: int, *, shared_input: bool) -> int:
    """Bytes that a norm saves which has `rows` vectors of `size` elements for each token.

    The C function on CPUs saves only the input. torch's RMSNorm on a CPU computes in fp32 and saves the converted input
    and the normalised input, both in fp32. With norm_offset every device converts the input, and also saves the sum of
    weight and offset in fp32.
    """
    width = rows * size
    own_input = 0 if shared_input else width * batch.element_bytes
    if uses_c_norm(batch):
        return batch.tokens * own_input
    if config.norm != "rmsnorm":  # mean and reciprocal standard deviation of each vector
        return batch.tokens * (own_input + 2 * rows * (FP32 if batch.cuda else batch.element_bytes))
    if batch.element_bytes != FP32 and (config.norm_offset or not batch.cuda):
        own_input = width * FP32
    offset_weight = size * FP32 if config.norm_offset else 0
    normalised = 0 if batch.cuda else width * FP32
    return batch.tokens * (own_input + normalised + rows * FP32) + offset_weight


def uses_c_norm(batch: MicroBatch) -> bool:
    """Return whether model/kernels/norm.py computes norms in C: on CPUs in bf16, if there is a compiler."""
    return not batch.cuda and batch.element_bytes == 2 and not batch.fp16


def recomputes_norms(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether `qkv` and a dense MLP recompute the norm before them instead of saving it (kernels/norm.py)."""
    shares_with_tiles = config.shared_norm and batch.mlp_tiles > 1
    return config.pre_norm and uses_c_norm(batch) and batch.tensor_parallel_size == 1 \
        and not (batch.keeps_norms or shares_with_tiles)


def column_backward(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of a column-parallel layer's backward pass: the gathered input [N, D], its gradient, and their shards.

    model/layers/linear.py copies gradients of several samples in the order of the shards.
    """
    complete = batch.tokens * config.hidden_size * batch.element_bytes
    return complete * (3 if batch.samples > 1 else 2) + 2 * hidden_states_bytes(config, batch)


def linear_saved(inputs: int, batch: MicroBatch) -> int:
    """Bytes that the product of [N, inputs] with a weight saves: its input."""
    return batch.tokens * inputs * batch.element_bytes


def dropout_saved(probability: float, width: int, batch: MicroBatch) -> int:
    """Bytes that dropout of [N, width] saves between two layers: its mask."""
    return batch.shard_tokens * width * batch.mask_bytes if probability > 0 else 0


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
    elif config.attention_softcap:
        core = _capped_attention_saved(config, batch) + output
    elif not batch.cuda and config.attention_dropout:
        core = _unfused_attention_saved(config, batch) + output
    else:
        core = _fused_attention_saved(config, batch, window)
    qkv_input = 0 if recomputes_norms(config, batch) else hidden_states_bytes(config, batch)
    return qkv_input + _qk_norm_saved(config, batch) + core


def _qk_norm_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that the norms of queries and keys save. Their inputs are views of the output of `qkv`."""
    if not config.qk_norm:
        return 0
    total = 0
    for heads in (config.num_heads, config.num_kv_heads):
        own_heads = heads // batch.tensor_parallel_size
        rows, size = (own_heads, config.head_size) if config.qk_norm == "head" else (1, own_heads * config.head_size)
        total += _norm_saved(config, batch, rows, size, shared_input=True)
    return total


def uses_cpu_attention(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether a custom operator computes the attention, in C or not: on CPUs in bf16 without dropout."""
    return not batch.cuda and batch.element_bytes == 2 and not batch.fp16 and not config.attention_dropout


def uses_c_attention(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether model/kernels/cpu/attention.py computes the attention, which rotates q and k itself."""
    return batch.c_attention and uses_cpu_attention(config, batch)


def query_width(config: ModelConfig, batch: MicroBatch) -> int:
    """Elements of one token's queries on this rank, H * E."""
    return config.num_heads * config.head_size // batch.tensor_parallel_size


def _qkv_width(config: ModelConfig, batch: MicroBatch) -> int:
    """Elements of one token's queries, keys and values on this rank: the output width of `qkv`."""
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_size // batch.tensor_parallel_size


def qkv_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the output of `qkv`, and of its gradient."""
    return batch.tokens * _qkv_width(config, batch) * batch.element_bytes


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
    return batch.tokens * (new + (_qkv_width(config, batch) if has_views else 0)) * batch.element_bytes


def _qk_norm_keeps_input(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether the norms of queries and keys save views of the output of `qkv`, instead of an fp32 copy."""
    converts = batch.element_bytes != FP32 and (config.norm_offset or not batch.cuda) and not uses_c_norm(batch)
    return bool(config.qk_norm) and not converts


def _fused_attention_saved(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes that torch's fused attention saves: q, k, v, the output and fp32 logarithms of the softmax sums [N, H].

    `out` saves the same storage as its input. On CPUs with RoPE the output has another memory order, and `out` saves a
    copy, as it does after an exchange between the ranks of a sequence. With a window, the mask [T, T] is converted to
    the dtype of q and saved (model/kernels/torch_attention.py), unless shared_mask_bytes counts it.
    """
    copied = batch.sequence_parallel_size > 1 or (not batch.cuda and config.position == "rope")
    outputs = 2 if copied else 1
    log_sums = round(batch.tokens * config.num_heads / batch.tensor_parallel_size) * FP32
    has_window, alibi = 0 < window < batch.seq_length, config.position == "alibi"
    documents = batch.documents and batch.cuda  # on CPUs a sample may be a single document, which needs no mask
    mask = batch.seq_length**2 * batch.element_bytes if has_window and not alibi and not documents else 0
    return _qkv_saved(config, batch, all_heads=has_window or alibi or documents) + log_sums + mask \
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


def mlp_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that a dense MLP saves.

    These are its inner tensors [N, F] unless tiles are recomputed, and its input [N, D] unless that is recomputed.
    """
    if batch.mlp_tiles > 1:
        return hidden_states_bytes(config, batch)
    return mlp_inner(config, batch) + (0 if recomputes_norms(config, batch) else hidden_states_bytes(config, batch))


def mlp_inner(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the inner tensors of a dense MLP that its backward pass needs, of all tiles together."""
    return _inner_saved(config, config.intermediate_size // batch.tensor_parallel_size, batch)


def _inner_saved(config: ModelConfig, inner: int, batch: MicroBatch) -> int:
    """Bytes of the outputs of `up` and `gate`, [N, inner] each. model/kernels/activation.py recomputes the rest."""
    return (2 if config.gated_mlp else 1) * batch.tokens * inner * batch.element_bytes


def experts_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that an MLP of experts saves.

    The router saves its input, the probabilities [N, num_experts] in fp32, and for each assignment of a token to an
    expert: three indices, its probability in fp32 if that is divided by the sum, and its factor. The layer also saves
    the tokens sent to the experts, the experts' inner tensors and outputs, and the tensors of the shared expert. Of
    tensor-parallel ranks, each routes its shard of the sequences.
    """
    shard = replace(batch, tokens=batch.shard_tokens)
    sent = replace(batch, tokens=shard.tokens * config.experts_per_token)
    router = linear_saved(config.hidden_size, shard) + shard.tokens * config.num_experts * FP32
    router += sent.tokens * (3 * INT64 + batch.element_bytes)
    if config.norm_topk_prob:  # and the sum
        router += sent.tokens * FP32 + shard.tokens * FP32
    inner = _inner_saved(config, config.moe_intermediate_size, sent)
    shared = _inner_saved(config, config.shared_expert_size // batch.tensor_parallel_size, batch)
    if config.shared_expert_gate:  # its output, and the shared expert's
        shared += linear_saved(1, shard) + linear_saved(config.hidden_size, shard)
    return router + 2 * linear_saved(config.hidden_size, sent) + inner + shared


def fp8_work(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that the largest product of a block needs in FP8 (model/kernels/fp8.py); 0 without FP8.

    One operand at a time is cast by way of fp32. The FP8 values of both remain; on CUDA, those of the second one are
    copied into another order. The emulation converts both to fp32 again, and its product from fp32. The product itself,
    a gradient, is counted elsewhere.
    """
    if not batch.fp8:
        return 0
    hidden, inner, ways = config.hidden_size, config.intermediate_size // batch.mlp_tiles, []
    for inputs, outputs in ((hidden, _qkv_width(config, batch)), (query_width(config, batch), hidden),
                            (hidden, inner), (inner, hidden)):
        x, weight, out = batch.tokens * inputs, inputs * outputs, batch.tokens * outputs
        for first, second, result in ((x, weight, out), (out, weight, x), (out, x, weight)):
            casts = max((FP32 + 1) * first, first + (FP32 + 1) * second)
            emulated = (FP32 + 1) * (first + second) + FP32 * result
            ways.append(max(casts, first + 2 * second) if batch.cuda else emulated)
    return max(ways)


def attention_backward(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes of gradients and working memory in attention's backward pass.

    The peak is the larger of two sums: the gradients of the output and of q, k and v with the kernel's working memory,
    or the gradients of q, k and v twice, while they are concatenated for `qkv`. The exchange between the ranks of a
    sequence has them three times: before, after, and in the order of `qkv`. With soft-capping, or with dropout on a
    CPU, torch has no fused kernel. The peak is then a gradient [H, N, T] in fp32, or two of them without dropout.
    """
    scores = round(batch.tokens * batch.seq_length * config.num_heads / batch.tensor_parallel_size) * FP32
    if config.attention_softcap and not uses_cpu_attention(config, batch):
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
    if uses_cpu_attention(config, batch):
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
    if batch.cuda or config.attention_dropout:
        windows = {window if window < batch.seq_length else 0 for window in config.windows or (0,)}
        heads = config.num_heads // batch.head_ranks if config.position == "alibi" else 1
        masks = batch.samples * heads * batch.seq_length**2 * batch.element_bytes * len(windows)
    return tokens * INT64 + tables + masks
