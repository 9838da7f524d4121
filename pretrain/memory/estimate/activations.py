"""Bytes that autograd saves for the backward pass: one function for each operator in `pretrain/model`.

CPU: measured with `torch.autograd.graph.saved_tensors_hooks` on the real layers, each storage counted once
(tests/memory/estimate/test_activations.py repeats the measurement).
CUDA: derived from torch's formulas, not measured. Flash attention saves q, k, v, its output and the logarithm of each
softmax sum. Dropout saves one byte per element. LayerNorm saves its statistics in fp32. RMSNorm is one kernel, which
saves its input. `--compile_blocks` is ignored, as the compiler chooses what a compiled block saves.

Tensor parallelism: the inner tensors of attention and MLP are divided, the inputs of norms and the dropout masks are
not: Megatron-LM without its sequence parallelism (arXiv 2205.05198, table 2: s b h (10 + 24 / t) bytes a layer).
Ulysses (arXiv 2309.14509): every tensor is divided by the ranks of a sequence, by tokens outside attention and by
heads inside. Experts receive `experts_per_token` times the tokens, evenly (DeepSpeed-MoE with capacity factor 1).

Shapes in docstrings: N tokens of the micro-batch, D hidden_size, F intermediate_size, H heads, E head_size, T
seq_length. Every size is that of one rank.
"""

from dataclasses import replace

from pretrain.memory.estimate.loss_activations import loss_saved
from pretrain.memory.estimate.model_shape import Layer, ModelShape
from pretrain.memory.estimate.rank_parameters import FP32, INT64, MicroBatch

CPU_SCORES = 2**20  # attention scores that a CPU thread holds at a time (model/kernels/cpu_attention.py)
ATTENTION_ROWS = 128  # queries that the CPU kernel processes at a time (model/kernels/cpu_attention.py)


def hidden_states_bytes(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes of the tensor [N, D] that one layer passes to the next."""
    return batch.tokens * shape.hidden_size * batch.element_bytes


def norm_saved(shape: ModelShape, batch: MicroBatch, *, shared_input: bool = False) -> int:
    """Bytes that a norm of [N, D] saves: its input and its statistics.

    RMSNorm on a CPU computes in fp32 and saves the converted input and the normalised input, both in fp32.

    Args:
        shared_input: another operator saves the same input, so it is not counted here.
    """
    hidden = shape.hidden_size
    own_input = 0 if shared_input else hidden * batch.element_bytes
    if shape.norm != "rmsnorm":  # mean and reciprocal standard deviation of each token
        return batch.tokens * (own_input + 2 * (FP32 if batch.cuda else batch.element_bytes))
    if batch.cuda:
        return batch.tokens * (own_input + FP32)
    converted = hidden * FP32 if batch.element_bytes != FP32 else own_input
    return batch.tokens * (converted + hidden * FP32 + FP32)


def linear_saved(inputs: int, batch: MicroBatch) -> int:
    """Bytes that the product of [N, inputs] with a weight saves: its input."""
    return batch.tokens * inputs * batch.element_bytes


def dropout_saved(probability: float, width: int, batch: MicroBatch) -> int:
    """Bytes that dropout of [N, width] saves: its mask."""
    return batch.tokens * width * batch.mask_bytes if probability > 0 else 0


def attention_saved(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes that causal attention saves, without its norm: the inputs of `qkv`, of the attention core, of `out`."""
    if not batch.cuda and shape.attention_dropout:
        core = _unfused_attention_saved(shape, batch) + linear_saved(_query_width(shape, batch), batch)
    elif _uses_cpu_attention(shape, batch):
        core = _qkv_saved(shape, batch) + linear_saved(_query_width(shape, batch), batch)
    else:
        core = _flash_attention_saved(shape, batch)
    return linear_saved(shape.hidden_size, batch) + core


def _uses_cpu_attention(shape: ModelShape, batch: MicroBatch) -> bool:
    """Return whether model/kernels/cpu_attention.py computes the attention: on CPUs in bf16 without dropout."""
    return not batch.cuda and batch.element_bytes == 2 and not batch.fp16 and not shape.attention_dropout


def _query_width(shape: ModelShape, batch: MicroBatch) -> int:
    """Elements of one token's queries on this rank, H * E."""
    return shape.num_heads * shape.head_size // batch.tensor_parallel_size


def _qkv_width(shape: ModelShape, batch: MicroBatch) -> int:
    """Elements of one token's queries, keys and values on this rank: the output width of `qkv`."""
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size // batch.tensor_parallel_size


def _qkv_saved(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes of q, k and v, which are views of the output of `qkv`.

    Rotation (RoPE) makes new tensors of q and k; the output of `qkv` stays allocated, as v is still a view of it.
    """
    heads = shape.num_heads + shape.num_kv_heads
    rotated = heads * shape.head_size // batch.tensor_parallel_size if shape.position == "rope" else 0
    return batch.tokens * (_qkv_width(shape, batch) + rotated) * batch.element_bytes


def _flash_attention_saved(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes that torch's fused attention saves: q, k, v, the output and fp32 logarithms of the softmax sums [N, H].

    `out` saves the same storage as its input. On CPUs with RoPE the output has another memory order, and `out` saves a
    copy.
    """
    outputs = 2 if not batch.cuda and shape.position == "rope" else 1
    log_sums = round(batch.tokens * shape.num_heads / batch.tensor_parallel_size) * FP32
    return _qkv_saved(shape, batch) + outputs * linear_saved(_query_width(shape, batch), batch) + log_sums


def _unfused_attention_saved(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes that attention with dropout saves on a CPU, where torch has no fused kernel for it.

    These are q, k and v of all heads in fp32, and three fp32 tensors [H, N, T]: softmax, noise and their product.
    """
    heads = shape.num_heads / batch.tensor_parallel_size
    return round(batch.tokens * heads * (3 * shape.head_size + 3 * batch.seq_length) * FP32)


def mlp_saved(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes that a dense MLP saves: its input [N, D] and its inner tensors [N, F]."""
    inner = shape.intermediate_size // batch.tensor_parallel_size
    return linear_saved(shape.hidden_size, batch) + _inner_saved(shape, inner, batch)


def _inner_saved(shape: ModelShape, inner: int, batch: MicroBatch) -> int:
    """Bytes of the outputs of `up` and `gate`, [N, inner] each. model/kernels/activation.py recomputes the rest."""
    return (2 if shape.gated_mlp else 1) * batch.tokens * inner * batch.element_bytes


def experts_saved(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes that an MLP of experts saves.

    The router saves its input and two fp32 tensors [N, num_experts]. The layer also saves the tokens sent to the
    experts, the experts' inner tensors, the tokens sent back, and the inner tensors of the shared expert.
    """
    sent = replace(batch, tokens=batch.tokens * shape.experts_per_token)
    router = linear_saved(shape.hidden_size, batch) + 2 * batch.tokens * shape.num_experts * FP32
    inner = _inner_saved(shape, shape.moe_intermediate_size // batch.tensor_parallel_size, sent)
    shared = _inner_saved(shape, shape.shared_expert_size // batch.tensor_parallel_size, batch)
    return router + 2 * linear_saved(shape.hidden_size, sent) + inner + shared


def block_saved(shape: ModelShape, batch: MicroBatch, *, experts: bool = False) -> int:
    """Bytes that a transformer block saves: norms, attention, MLP or experts, and two residual dropouts."""
    norms = norm_saved(shape, batch)
    for _ in range(1, shape.norms_per_block):
        norms += norm_saved(shape, batch, shared_input=shape.parallel_residual)
    mlp = experts_saved(shape, batch) if experts else mlp_saved(shape, batch)
    if shape.norms_per_block == 1:  # attention and MLP have the same input
        mlp -= linear_saved(shape.hidden_size, batch)
    dropouts = 2 * dropout_saved(shape.residual_dropout, shape.hidden_size, batch)
    return norms + attention_saved(shape, batch) + mlp + dropouts


def layer_saved(shape: ModelShape, layer: Layer, batch: MicroBatch) -> int:
    """Bytes that any layer of `shape.layers()` saves. The embedding saves its int64 token ids [N]."""
    if layer.kind == "block":
        return block_saved(shape, batch, experts=any(tensor.expert for tensor in layer.tensors))
    if layer.kind == "norm":
        return norm_saved(shape, batch)
    if layer.kind == "head":
        return loss_saved(shape, batch)
    dropout = dropout_saved(shape.embedding_dropout, shape.hidden_size, batch)
    if layer.kind == "positions":
        return dropout
    return batch.tokens * INT64 + (0 if shape.position == "learned" else dropout)


def layer_input_bytes(shape: ModelShape, layer: Layer, batch: MicroBatch) -> int:
    """Bytes of a layer's input, which is all that a recomputed group beginning with this layer saves."""
    return batch.tokens * INT64 if layer.kind == "embedding" else hidden_states_bytes(shape, batch)


def saved_input_bytes(shape: ModelShape, layer: Layer, batch: MicroBatch) -> int:
    """Bytes of a layer's input that `layer_saved` includes, for embeddings, positions and blocks."""
    if layer.kind == "block" and shape.norm == "rmsnorm" and not batch.cuda and batch.element_bytes != FP32:
        return 0  # the norm saves an fp32 copy instead
    return 0 if layer.kind == "positions" else layer_input_bytes(shape, layer, batch)


def block_backward(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes that a block's backward pass allocates at its peak, beyond what the block saved.

    The gradient of the residual stream exists during the complete pass. The larger of two phases adds to it. The MLP's
    phase has recomputed tensors and gradients of inner tensors. The attention's phase follows, after the MLP's saved
    tensors are freed.
    """
    residual = hidden_states_bytes(shape, batch) * (2 if shape.residual_dropout > 0 else 1)
    width = shape.intermediate_size
    if shape.num_experts:
        width = shape.moe_intermediate_size * max(1, shape.experts_per_token)
    inner = batch.tokens * (width // batch.tensor_parallel_size) * batch.element_bytes
    mlp = (3 if shape.gated_mlp else 2) * inner
    freed = mlp_saved(shape, batch) + norm_saved(shape, batch)
    if _uses_cpu_attention(shape, batch):  # only `out` saves the attention's output, and frees it before this phase
        freed += linear_saved(_query_width(shape, batch), batch)
    return residual + max(mlp, _attention_backward(shape, batch) - freed)


def _attention_backward(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes of gradients and working memory in attention's backward pass.

    The peak is the larger of two sums: the gradients of the output and of q, k and v with the kernel's working memory,
    or the gradients of q, k and v twice, while they are concatenated for `qkv`. With dropout on a CPU torch has no
    fused kernel, and the peak is a gradient [H, N, T] in fp32.
    """
    if not batch.cuda and shape.attention_dropout:
        return round(batch.tokens * batch.seq_length * shape.num_heads / batch.tensor_parallel_size) * FP32
    qkv = batch.tokens * _qkv_width(shape, batch) * batch.element_bytes
    work = _cpu_attention_work(shape, batch) if _uses_cpu_attention(shape, batch) else 0
    return max(linear_saved(_query_width(shape, batch), batch) + qkv + work, 2 * qkv)


def _cpu_attention_work(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes of working memory in the backward pass of model/kernels/cpu_attention.py.

    The kernel processes as many samples at once as have CPU_SCORES scores, in blocks of ATTENTION_ROWS queries. It
    holds k and v in the order of heads, their gradients in fp32, a block's queries and output gradients, and several
    tensors [H, rows, T]: scores, probabilities and their gradients. At the peak one of two more tensors exists: the
    previous block's scores (`previous` is that block's length as a fraction of T), or the product that is added to the
    gradient of k.
    """
    heads, kv_heads = shape.num_heads / batch.tensor_parallel_size, shape.num_kv_heads / batch.tensor_parallel_size
    samples = min(batch.samples, max(1, int(CPU_SCORES // (heads * ATTENTION_ROWS * batch.seq_length))))
    rows, previous = min(ATTENTION_ROWS, batch.seq_length), max(0.0, 1 - ATTENTION_ROWS / batch.seq_length)
    keys = kv_heads * batch.seq_length * shape.head_size
    scores = heads * rows * batch.seq_length
    scores = max((3 + previous) * scores, (2 + 3 * previous) * scores, 3 * scores + keys)
    queries = 2 * heads * rows * shape.head_size
    return round(samples * ((scores + queries + 2 * keys) * batch.element_bytes + 2 * keys * FP32)) \
        + ATTENTION_ROWS**2 * batch.element_bytes
