"""Bytes that a layer keeps for the backward pass, with and without recomputation, and its backward pass's own memory.

A part of a block that is recomputed (model/layers/block.py, Block) keeps only its input. The rest is allocated again
when the backward pass reaches the part. tests/memory/estimate/test_activations.py compares this file with autograd
on a CPU.

Shapes in docstrings: N tokens of the micro-batch, D hidden_size.
"""

from pretrain.memory.estimate.activations import (
    attention_backward,
    attention_saved,
    column_backward,
    dropout_saved,
    experts_saved,
    hidden_states_bytes,
    linear_saved,
    mlp_inner,
    mlp_saved,
    norm_saved,
    qkv_bytes,
    query_width,
    uses_c_attention,
    uses_c_norm,
    uses_cpu_attention,
)
from pretrain.memory.estimate.loss_activations import loss_saved
from pretrain.memory.estimate.rank_parameters import FP32, INT64, MicroBatch
from pretrain.model.description import Layer, ModelConfig


def block_saved(shape: ModelConfig, batch: MicroBatch, *, experts: bool = False, window: int = 0,
                part: str = "none") -> int:
    """Bytes that a transformer block saves: norms, attention, MLP or experts, and two residual dropouts.

    Args:
        part: "attention" or "mlp": this part is recomputed.
    """
    shared_norm = norm_saved(shape, batch) if shape.pre_norm and shape.shared_norm else 0
    attention, mlp = _attention_part(shape, batch, window), _mlp_part(shape, batch, experts=experts)
    dropouts = 2 * dropout_saved(shape.residual_dropout, shape.hidden_size, batch)
    not_kept = 0
    if part == "attention":
        not_kept = attention - hidden_states_bytes(shape, batch)
    elif part == "mlp":
        not_kept = mlp - (0 if _mlp_input_is_kept(shape, batch) else hidden_states_bytes(shape, batch))
    return shared_norm + attention + mlp + dropouts - not_kept


def _attention_part(shape: ModelConfig, batch: MicroBatch, window: int) -> int:
    """Bytes that attention saves with the norms around it, which are recomputed with it."""
    pre_norm = norm_saved(shape, batch) if shape.pre_norm and not shape.shared_norm else 0
    post_norm = norm_saved(shape, batch) if shape.post_norm else 0
    return pre_norm + attention_saved(shape, batch, window) + post_norm


def _mlp_part(shape: ModelConfig, batch: MicroBatch, *, experts: bool) -> int:
    """Bytes that MLP or experts save with the norms around them, without an input that attention saves."""
    pre_norm = 0
    if shape.pre_norm and not shape.shared_norm:
        pre_norm = norm_saved(shape, batch, shared_input=shape.parallel_residual)
    post_norm = norm_saved(shape, batch) if shape.post_norm else 0
    mlp = experts_saved(shape, batch) if experts else mlp_saved(shape, batch)
    if shape.shared_norm:  # attention and MLP have the same input
        mlp -= hidden_states_bytes(shape, batch)
    return pre_norm + mlp + post_norm


def _mlp_input_is_kept(shape: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether attention or its norm keep the MLP's input anyway, which `_mlp_part` then does not contain."""
    return shape.shared_norm or (shape.parallel_residual and not _norm_converts(shape, batch))


def _recomputed(shape: ModelConfig, batch: MicroBatch, part: str, window: int, *, experts: bool) -> int:
    """Bytes that the recomputation of a part allocates: what the part saves, without its input, which was kept."""
    copies_input = _norm_converts(shape, batch) and not shape.shared_norm
    hidden = 0 if copies_input else hidden_states_bytes(shape, batch)
    if part == "attention":
        return _attention_part(shape, batch, window) - hidden
    if part == "mlp":
        return _mlp_part(shape, batch, experts=experts) - (0 if _mlp_input_is_kept(shape, batch) else hidden)
    return 0


def _norm_converts(shape: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether the norm before attention or MLP saves its input in fp32 instead of the input itself."""
    converts = shape.norm == "rmsnorm" and batch.element_bytes != FP32 and (shape.norm_offset or not batch.cuda)
    return shape.pre_norm and bool(converts) and not uses_c_norm(batch)


def layer_saved(shape: ModelConfig, layer: Layer, batch: MicroBatch, part: str = "none") -> int:
    """Bytes that any layer of `shape.layers()` saves. The embedding saves its int64 token ids [N].

    Args:
        part: the part of a block that is recomputed: "attention" or "mlp".
    """
    if layer.kind == "block":
        return block_saved(shape, batch, experts=layer.has_experts, window=layer.window, part=part)
    if layer.kind == "norm":
        return norm_saved(shape, batch)
    if layer.kind == "head":
        return loss_saved(shape, batch)
    dropout = dropout_saved(shape.embedding_dropout, shape.hidden_size, batch)
    if layer.kind == "positions":
        return dropout
    return batch.tokens * INT64 + (0 if shape.position == "learned" else dropout)


def layer_input_bytes(shape: ModelConfig, layer: Layer, batch: MicroBatch) -> int:
    """Bytes of a layer's input, which is all that a recomputed group beginning with this layer saves."""
    return batch.tokens * INT64 if layer.kind == "embedding" else hidden_states_bytes(shape, batch)


def saved_input_bytes(shape: ModelConfig, layer: Layer, batch: MicroBatch) -> int:
    """Bytes of a layer's input that `layer_saved` includes, for embeddings, positions and blocks."""
    if layer.kind == "block" and _norm_converts(shape, batch):
        return 0  # the norm saves an fp32 copy instead
    return 0 if layer.kind == "positions" else layer_input_bytes(shape, layer, batch)


def block_backward(shape: ModelConfig, batch: MicroBatch, window: int = 0, part: str = "none") -> int:
    """Bytes that a block's backward pass allocates at its peak, beyond what the block saved with this `part`.

    The gradient of the residual stream exists during the complete pass. The largest of three phases adds to it. A
    post-norm comes first; torch's RMSNorm on a CPU has four tensors in fp32. The MLP's phase has recomputed tensors and
    gradients of inner tensors, of one tile at a time with --mlp_tiles. The attention's phase follows, after the MLP's
    saved tensors are freed. A part that is recomputed is allocated at the beginning of its phase.
    """
    residual = hidden_states_bytes(shape, batch) * (2 if shape.residual_dropout > 0 else 1)
    width = shape.intermediate_size
    if shape.num_experts:
        width = shape.moe_intermediate_size * max(1, shape.experts_per_token)
    inner = batch.tokens * (width // batch.tensor_parallel_size) * batch.element_bytes
    norm = norm_saved(shape, batch)
    gradients = (3 if shape.gated_mlp else 2) * inner
    if batch.mlp_tiles > 1:  # a tile is recomputed; gradients of the inputs of all tiles
        gradients = (gradients + mlp_inner(shape, batch)) // batch.mlp_tiles + hidden_states_bytes(shape, batch)
    mlp = gradients - (norm if shape.post_norm else 0)  # post_norm2 is freed before
    freed = mlp_saved(shape, batch) + (2 * norm if shape.post_norm else 0) + (norm if shape.pre_norm else 0)
    if uses_cpu_attention(shape, batch) and not uses_c_attention(shape, batch):
        # only `out` saves the attention's output, and frees it before this phase
        freed += linear_saved(query_width(shape, batch), batch)
    on_cpu_in_fp32 = shape.post_norm and shape.norm == "rmsnorm" and not batch.cuda and not uses_c_norm(batch)
    post_norm = 4 * batch.shard_tokens * shape.hidden_size * FP32 if on_cpu_in_fp32 else 0
    attention = attention_backward(shape, batch, window)
    if batch.tensor_parallel_size > 1:  # when the gradients of the inner tensors exist
        columns = column_backward(shape, batch)
        mlp = max(mlp, (2 if shape.gated_mlp else 1) * inner + columns)
        attention = max(attention, qkv_bytes(shape, batch) + columns)
    attention -= freed
    recomputed = _recomputed(shape, batch, part, window, experts=shape.num_experts > 0)
    if part == "mlp":  # its tensors are freed before attention's phase, but were not there before its own
        return residual + max(mlp + recomputed, post_norm + recomputed, attention + recomputed)
    if part == "attention":  # with all recomputed tensors, its phase begins with the post-norm
        attention = max(attention, post_norm - _mlp_part(shape, batch, experts=shape.num_experts > 0)) + recomputed
    return residual + max(mlp, post_norm, attention)
