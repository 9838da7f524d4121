"""Bytes of the head and the loss, which model/kernels/fused_loss.py computes as one operator.

Shapes in docstrings: N tokens of the micro-batch, C tokens of a chunk, D hidden_size, V vocab_size on this rank.
tests/memory/estimate/test_activations.py measures the same numbers on a CPU.
"""

from pretrain.memory.estimate.rank_parameters import FP32, INT64, MicroBatch
from pretrain.model.description import ModelConfig

CHUNK_TOKENS = 1024  # tokens whose logits exist at the same time, for each tensor-parallel rank (fused_loss.py)
CPU_LOGITS = 2**20  # softmax elements that one CPU thread computes at a time (fused_loss.py); assumes one thread
CPU_PRODUCT = 2**20  # elements of the matrix's gradient that a CPU computes at a time (fused_loss.py)


def _vocab_size(shape: ModelConfig, batch: MicroBatch) -> int:
    return shape.vocab_size // batch.tensor_parallel_size


def _weight_bytes(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the head's matrix [V, D], and of its gradient."""
    return shape.hidden_size * _vocab_size(shape, batch) * batch.element_bytes


def _logits_bytes(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the logits [C, V] that exist at the same time."""
    return _chunk(batch) * _vocab_size(shape, batch) * batch.element_bytes


def _chunk(batch: MicroBatch) -> int:
    """Tokens whose logits exist at the same time."""
    return min(batch.tokens, CHUNK_TOKENS * batch.tensor_parallel_size)


def loss_saved(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that head and loss save.

    The forward pass already computes the gradients of the hidden states [N, D], of the matrix [V, D], and of the bias
    [V] in fp32. It saves these with the int64 labels [N] and the fp32 token weights [N].
    """
    hidden_gradient = batch.tokens * shape.hidden_size * batch.element_bytes
    bias_gradient = _vocab_size(shape, batch) * FP32 if shape.head_bias else 0
    return hidden_gradient + _weight_bytes(shape, batch) + bias_gradient + batch.tokens * (INT64 + FP32)


def loss_peak(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of head and loss at the peak of their forward pass, without their input.

    The sum has four parts: the saved tensors, two fp32 vectors [N], one chunk's logits, and the larger of (a) the
    chunk's softmax in fp32 and (b) the chunk's hidden states multiplied with the token weights. A CPU computes the
    softmax of a few rows at a time, so that they stay in its cache; the result of the previous rows still exists then.
    In bf16 without soft-capping, a C function needs no memory for it. In bf16 and fp16, the gradients of several chunks
    are added in fp32. When this sum is converted, the logits no longer exist.

    Tensor-parallel ranks gather the hidden states, and compute the softmax of a complete chunk
    (model/kernels/vocabulary_shards.py): of the fp32 logits, their distance from the largest one and its exponential.
    """
    vocab_size, converts = _vocab_size(shape, batch), batch.element_bytes != FP32
    chunk = _chunk(batch)
    rows = chunk if batch.cuda else min(chunk, max(1, CPU_LOGITS // vocab_size))
    tensors = 2 if converts or shape.logit_softcap else 1  # the softmax, and the logits converted to fp32 or capped
    next_rows = min(rows, chunk - rows)
    softmax_rows = max(tensors * rows, rows + tensors * next_rows)
    if shape.logit_softcap:  # the capped logits of the previous rows also exist while the next ones are computed
        softmax_rows = 2 * rows + next_rows
    weighted = chunk * shape.hidden_size * (FP32 + (batch.element_bytes if converts else 0))
    in_c = not batch.cuda and batch.element_bytes == 2 and not batch.fp16 and not shape.logit_softcap
    gathered = 0
    if batch.tensor_parallel_size > 1:
        gathered = batch.tokens * shape.hidden_size * batch.element_bytes
        softmax_rows, in_c = (tensors + 1) * chunk, False
    adds_in_fp32 = converts and chunk < batch.tokens
    if adds_in_fp32:
        weighted = max(weighted, _part_of_sum(shape, batch, in_c=in_c))
    work = _logits_bytes(shape, batch) + (weighted if in_c else max(softmax_rows * vocab_size * FP32, weighted))
    if adds_in_fp32:  # instead of the gradient in the dtype of the matrix, which is made of it at the end
        work = max(work, _weight_bytes(shape, batch)) + vocab_size * shape.hidden_size * FP32
        work -= _weight_bytes(shape, batch)
    return loss_saved(shape, batch) + 2 * batch.tokens * FP32 + work + gathered


def _part_of_sum(shape: ModelConfig, batch: MicroBatch, *, in_c: bool) -> int:
    """Bytes of a chunk's weighted hidden states, and on CPUs of the product that is added to the sum in fp32."""
    if batch.cuda:
        return 0
    copies = 2 if in_c else 1  # with their transpose
    product = min(CPU_PRODUCT, _vocab_size(shape, batch) * shape.hidden_size)
    return (copies * _chunk(batch) * shape.hidden_size + product) * batch.element_bytes


def loss_backward(shape: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that the loss's backward pass allocates at its peak, beyond what it saved and the gradient of the matrix.

    The pass scales the saved gradient of the hidden states [N, D] in fp32 and converts the result to their dtype. The
    fp32 copy is freed before the gradient of the matrix is scaled. Only its excess over that gradient counts.
    """
    scaled = batch.tokens * shape.hidden_size * batch.element_bytes
    in_fp32 = batch.tokens * shape.hidden_size * FP32 if batch.element_bytes != FP32 else 0
    return scaled + max(0, in_fp32 - _weight_bytes(shape, batch))
