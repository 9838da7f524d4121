"""Bytes that a layer keeps for the backward pass, with and without recomputation, and its backward pass's own memory.

A part of a block that is recomputed (model/layers/block.py, Block) keeps only its input. The rest is allocated again
when the backward pass reaches the part. tests/memory/estimate/test_activations.py compares this file with autograd
on a CPU. Head and loss are one operator (model/kernels/fused_loss.py). Imports no torch.

Shapes in docstrings: N tokens of the micro-batch, C tokens of a chunk, D hidden_size, V vocab_size on this rank.
"""

from dataclasses import replace

from pretrain.model.attention_memory import attention_memory, attention_saved
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.operator_memory import (
    FP32,
    INT64,
    LossMemory,
    MicroBatch,
    added_work,
    column_backward,
    column_input_bytes,
    dropout_saved,
    experts_saved,
    hidden_states_bytes,
    linear_saved,
    mlp_inner,
    mlp_saved,
    norm_memory,
    norm_saved,
    offered,
    qkv_bytes,
    query_width,
    recomputes_norms,
    saves_inner,
)

# sizes by which model/kernels/fused_loss.py divides the work
CHUNK_TOKENS = 1024  # tokens whose logits exist at the same time, for each tensor-parallel rank: efficient products
CPU_LOGITS = 2**20  # fp32 softmax elements that a CPU thread computes at a time: they stay in the cache
CPU_PRODUCT = 2**20  # elements of the matrix's gradient that a CPU computes at a time, to add them in fp32: the same


def block_saved(config: ModelConfig, batch: MicroBatch, *, experts: bool = False, window: int = 0,
                part: str = "none") -> int:
    """Bytes that a transformer block saves: norms, attention, MLP or experts, and two residual dropouts.

    Args:
        part: "attention" or "mlp": this part is recomputed.
    """
    batch = _with_kept_norms(config, batch, part)
    shared_norm = norm_saved(config, batch) if config.pre_norm and config.shared_norm else 0
    attention, mlp = _attention_part(config, batch, window), _mlp_part(config, batch, experts=experts)
    dropouts = 2 * dropout_saved(config.residual_dropout, config.hidden_size, batch)
    not_kept = 0
    if part == "attention":
        not_kept = attention - hidden_states_bytes(config, batch)
    elif part == "mlp":
        not_kept = mlp - (0 if _mlp_input_is_kept(config, batch) else hidden_states_bytes(config, batch))
    return shared_norm + attention + mlp + dropouts - not_kept


def _with_kept_norms(config: ModelConfig, batch: MicroBatch, part: str) -> MicroBatch:
    """Return the batch of a block. If one part is recomputed, it keeps the norm that it shares with the other part."""
    return replace(batch, keeps_norms=True) if config.shared_norm and part in ("attention", "mlp") else batch


def _attention_part(config: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes that attention saves with the norms around it, which are recomputed with it."""
    pre_norm = norm_saved(config, batch) if config.pre_norm and not config.shared_norm else 0
    post_norm = norm_saved(config, batch) if config.post_norm else 0
    return pre_norm + attention_saved(config, batch, window) + post_norm


def _mlp_part(config: ModelConfig, batch: MicroBatch, *, experts: bool) -> int:
    """Bytes that MLP or experts save with the norms around them, without an input that attention saves."""
    pre_norm = 0
    if config.pre_norm and not config.shared_norm:
        pre_norm = norm_saved(config, batch, shared_input=config.parallel_residual)
    post_norm = norm_saved(config, batch) if config.post_norm else 0
    mlp = experts_saved(config, batch) if experts else mlp_saved(config, batch)
    if config.shared_norm and not recomputes_norms(config, batch):  # attention and MLP save the same input
        mlp -= column_input_bytes(config, batch)
    return pre_norm + mlp + post_norm


def _mlp_input_is_kept(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether attention or its norm keep the MLP's input anyway, which `_mlp_part` then does not contain."""
    return config.shared_norm or (config.parallel_residual and not _norm_converts(config, batch))


def _recomputed(config: ModelConfig, batch: MicroBatch, part: str, window: int, *, experts: bool) -> int:
    """Bytes that the recomputation of a part allocates: what the part saves, without its input, which was kept."""
    copies_input = _norm_converts(config, batch) and not config.shared_norm
    hidden = 0 if copies_input else hidden_states_bytes(config, batch)
    if part == "attention":
        return _attention_part(config, batch, window) - hidden
    if part == "mlp":
        return _mlp_part(config, batch, experts=experts) - (0 if _mlp_input_is_kept(config, batch) else hidden)
    return 0


def _norm_converts(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether the norm before attention or MLP saves its input in fp32 instead of the input itself."""
    return config.pre_norm and not norm_memory(config, batch).keeps_input


def layer_saved(config: ModelConfig, layer: Layer, batch: MicroBatch, part: str = "none") -> int:
    """Bytes that any layer of `config.layers()` saves. The embedding saves its int64 token ids [N].

    Args:
        part: the part of a block that is recomputed: "attention" or "mlp".
    """
    if layer.kind == "block":
        return block_saved(config, batch, experts=layer.has_experts, window=layer.window, part=part)
    if layer.kind == "norm":
        return norm_saved(config, batch)
    if layer.kind == "head":
        return loss_saved(config, batch)
    dropout = dropout_saved(config.embedding_dropout, config.hidden_size, batch)
    if layer.kind == "positions":
        return dropout
    return batch.tokens * INT64 + (0 if config.position == "learned" else dropout)


def layer_input_bytes(config: ModelConfig, layer: Layer, batch: MicroBatch) -> int:
    """Bytes of a layer's input, which is all that a recomputed group beginning with this layer saves."""
    return batch.tokens * INT64 if layer.kind == "embedding" else hidden_states_bytes(config, batch)


def saved_input_bytes(config: ModelConfig, layer: Layer, batch: MicroBatch) -> int:
    """Bytes of a layer's input that `layer_saved` includes, for embeddings, positions and blocks."""
    if layer.kind == "block" and _norm_converts(config, batch):
        return 0  # the norm saves an fp32 copy instead
    return 0 if layer.kind == "positions" else layer_input_bytes(config, layer, batch)


def block_backward(config: ModelConfig, batch: MicroBatch, window: int = 0, part: str = "none", *,
                   experts: bool = False) -> int:
    """Bytes that a block's backward pass allocates at its peak, beyond what the block saved with this `part`.

    The gradient of the residual stream exists during the complete pass. The largest of three phases adds to it. A
    post-norm comes first. The MLP's phase has recomputed tensors and gradients of inner tensors, of one tile at a time
    with --mlp_tiles. The attention's phase follows, after the MLP's saved tensors are freed. A part that is recomputed
    is allocated at the beginning of its phase.
    """
    batch = _with_kept_norms(config, batch, part)
    residual = hidden_states_bytes(config, batch) * (2 if config.residual_dropout > 0 else 1)
    residual += added_work(config, batch)  # at any product
    width = config.moe_intermediate_size * config.experts_per_token if experts else config.intermediate_size
    inner = batch.tokens * (width // batch.tensor_parallel_size) * batch.element_bytes
    norm = norm_saved(config, batch)
    gradients = (3 if config.gated_mlp else 2) * inner
    if saves_inner(batch) and not (experts and batch.cuda):  # the input of the last product was saved, and is freed
        gradients -= inner
    if batch.mlp_tiles > 1:  # a tile is recomputed; gradients of the inputs of all tiles
        gradients = (gradients + mlp_inner(config, batch)) // batch.mlp_tiles + hidden_states_bytes(config, batch)
    mlp = gradients - (norm if config.post_norm else 0)  # post_norm2 is freed before
    freed = experts_saved(config, batch) if experts else mlp_saved(config, batch)
    freed += (2 * norm if config.post_norm else 0) + (norm if config.pre_norm else 0)
    core = attention_memory(config, batch, window)
    if not core.saves_output:  # only `out` saves the attention's output, and frees it before this phase
        freed += linear_saved(query_width(config, batch), batch)
    post_norm = norm_memory(config, replace(batch, tokens=batch.shard_tokens)).backward if config.post_norm else 0
    attention = core.backward
    if batch.tensor_parallel_size > 1:  # when the gradients of the inner tensors exist
        columns = column_backward(config, batch)
        mlp = max(mlp, (2 if config.gated_mlp else 1) * inner + columns)
        attention = max(attention, qkv_bytes(config, batch) + columns)
    attention -= freed
    recomputed = _recomputed(config, batch, part, window, experts=experts)
    if part == "mlp":  # its tensors are freed before attention's phase, but were not there before its own
        return residual + max(mlp + recomputed, post_norm + recomputed, attention + recomputed)
    if part == "attention":  # its phase begins with the post-norm, and has all recomputed tensors
        attention = max(attention, post_norm - _mlp_part(config, batch, experts=experts)) + recomputed
    return residual + max(mlp, post_norm, attention)




def _vocab_size(config: ModelConfig, batch: MicroBatch) -> int:
    return config.vocab_size // batch.tensor_parallel_size


def _weight_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the head's matrix [V, D], and of its gradient."""
    return config.hidden_size * _vocab_size(config, batch) * batch.element_bytes


def _logits_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the logits [C, V] that exist at the same time."""
    return _chunk(batch) * _vocab_size(config, batch) * batch.element_bytes


def _chunk(batch: MicroBatch) -> int:
    """Tokens whose logits exist at the same time."""
    return min(batch.tokens, CHUNK_TOKENS * batch.tensor_parallel_size)


def loss_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that head and loss save.

    The forward pass already computes the gradients of the hidden states [N, D], of the matrix [V, D], and of the bias
    [V] in fp32. It saves these with the int64 labels [N] and the fp32 token weights [N].
    """
    hidden_gradient = batch.tokens * config.hidden_size * batch.element_bytes
    bias_gradient = _vocab_size(config, batch) * FP32 if config.head_bias else 0
    return hidden_gradient + _weight_bytes(config, batch) + bias_gradient + batch.tokens * (INT64 + FP32)


def loss_peak(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of head and loss at the peak of their forward pass, without their input.

    The sum has four parts: the saved tensors, two fp32 vectors [N], one chunk's logits, and the larger of (a) the
    chunk's softmax in fp32 and (b) the chunk's hidden states multiplied with the token weights. A CPU computes the
    softmax of a few rows at a time, so that they stay in its cache; the result of the previous rows still exists then.
    In bf16 and fp16, the gradients of several chunks are added in fp32. When this sum is converted, the logits no
    longer exist. Tensor-parallel ranks gather the hidden states.
    """
    vocab_size, converts = _vocab_size(config, batch), batch.element_bytes != FP32
    chunk, loss = _chunk(batch), _loss_memory(config, batch)
    weighted = chunk * config.hidden_size * (FP32 + (batch.element_bytes if converts else 0))
    gathered = batch.tokens * config.hidden_size * batch.element_bytes if batch.tensor_parallel_size > 1 else 0
    adds_in_fp32 = converts and chunk < batch.tokens
    if adds_in_fp32:
        weighted = max(weighted, _part_of_sum(config, batch, loss.copies))
    work = _logits_bytes(config, batch) + max(loss.softmax, weighted)
    if adds_in_fp32:  # instead of the gradient in the dtype of the matrix, which is made of it at the end
        work = max(work, _weight_bytes(config, batch)) + vocab_size * config.hidden_size * FP32
        work -= _weight_bytes(config, batch)
    return loss_saved(config, batch) + 2 * batch.tokens * FP32 + work + gathered


def _loss_memory(config: ModelConfig, batch: MicroBatch) -> LossMemory:
    """Return what a chunk needs beyond its logits.

    Tensor-parallel ranks compute the softmax of a complete chunk (model/kernels/vocabulary_shards.py): of the fp32
    logits, their distance from the largest one and its exponential.
    """
    found = offered(lambda memory: memory.loss(config, batch))
    if found is not None:
        return found
    vocab_size, chunk = _vocab_size(config, batch), _chunk(batch)
    rows = chunk if batch.cuda else min(chunk, max(1, CPU_LOGITS // vocab_size))
    # the softmax, and the logits converted to fp32 or capped
    tensors = 2 if batch.element_bytes != FP32 or config.logit_softcap else 1
    next_rows = min(rows, chunk - rows)
    softmax_rows = max(tensors * rows, rows + tensors * next_rows)
    if config.logit_softcap:  # the capped logits of the previous rows also exist while the next ones are computed
        softmax_rows = 2 * rows + next_rows
    if batch.tensor_parallel_size > 1:
        softmax_rows = (tensors + 1) * chunk
    return LossMemory(softmax_rows * vocab_size * FP32, copies=1)


def _part_of_sum(config: ModelConfig, batch: MicroBatch, copies: int) -> int:
    """Bytes of a chunk's weighted hidden states, and on CPUs of the product that is added to the sum in fp32."""
    if batch.cuda:
        return 0
    product = min(CPU_PRODUCT, _vocab_size(config, batch) * config.hidden_size)
    return (copies * _chunk(batch) * config.hidden_size + product) * batch.element_bytes


def loss_backward(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that the loss's backward pass allocates at its peak, beyond what it saved and the gradient of the matrix.

    The pass scales the saved gradient of the hidden states [N, D] in fp32 and converts the result to their dtype. The
    fp32 copy is freed before the gradient of the matrix is scaled. Only its excess over that gradient counts.
    """
    scaled = batch.tokens * config.hidden_size * batch.element_bytes
    in_fp32 = batch.tokens * config.hidden_size * FP32 if batch.element_bytes != FP32 else 0
    return scaled + max(0, in_fp32 - _weight_bytes(config, batch))
