"""Bytes of attention masks, and of the other tensors that all blocks of a rank share.

Shapes in docstrings: N tokens of the micro-batch, H heads, T seq_length.
"""

from pretrain.memory.estimate.activations import uses_cpu_attention
from pretrain.memory.estimate.rank_parameters import INT64, MicroBatch
from pretrain.model.description import ModelConfig


def shared_mask_bytes(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the attention masks that model/kernels/torch_attention.py makes once for all blocks of a rank.

    These are [T, T] of one byte for each size of a window (0 is a size with soft-capping), and [H, T, T] for ALiBi.
    """
    if uses_cpu_attention(shape, batch):
        return 0
    windows = {window for window in shape.windows or (0,) if 0 < window < batch.seq_length or shape.attention_softcap}
    windows = set() if batch.documents and batch.cuda else windows  # document_bytes counts them
    alibi = shape.num_heads // batch.head_ranks * batch.element_bytes if shape.position == "alibi" else 0
    return batch.seq_length**2 * (len(windows or {0} if alibi else windows) + alibi)


def document_bytes(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that --document_attention needs for each micro-batch until its backward pass, once for all blocks.

    These are the positions int64 [samples, T], the rotary tables for them, and where torch's operators compute the
    attention, the masks: [samples, T, T] in the dtype of q for each size of a window, with ALiBi [samples, H, T, T].
    """
    if not batch.documents:
        return 0
    ropes = 1 if len(set(shape.windows)) < 2 else 2  # layers with a window may have frequencies of their own
    tokens = batch.tokens * batch.sequence_parallel_size  # these tensors are not divided
    tables = ropes * tokens * shape.rotary_size * batch.element_bytes
    masks = 0
    if batch.cuda or shape.attention_dropout:
        windows = {window if window < batch.seq_length else 0 for window in shape.windows or (0,)}
        heads = shape.num_heads // batch.head_ranks if shape.position == "alibi" else 1
        masks = batch.samples * heads * batch.seq_length**2 * batch.element_bytes * len(windows)
    return tokens * INT64 + tables + masks
