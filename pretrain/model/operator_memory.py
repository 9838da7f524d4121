"""Bytes that autograd saves for the backward pass: one function for each operator of a block. Imports no torch.

The formulas are those of torch's operators. An extension that computes an operator itself (operators.py) states what
its implementation needs: see OperatorMemory.

attention_memory.py has the operators of attention. The description of a model (description.py) says which operators
there are. layer_memory.py adds them up for a layer.

CPU: measured with `torch.autograd.graph.saved_tensors_hooks` on the real layers, each storage counted once
(tests/memory/estimate/test_activations.py repeats the measurement).
CUDA: derived from torch's formulas, not measured. Dropout saves one byte per element. LayerNorm saves its statistics
in fp32. RMSNorm is one kernel, which saves its input. The compiler of `--compile_blocks` saves the input of each matrix
product and of attention, and what its kernels need to recompute the rest (torch/_functorch/partitioners.py). All of it
was compared with torch's allocator on a dry GPU: tools/dry_gpu/memory_table.py.

Tensor parallelism: every tensor is divided, by positions between the layers and by heads or columns inside attention
and MLP (Korthikanti et al., arXiv 2205.05198, table 2, "tensor + sequence parallel": s b h 34 / t bytes a layer).
Ulysses (arXiv 2309.14509): every tensor is divided by the ranks of a sequence, by tokens outside attention and by
heads inside. Experts receive `experts_per_token` times the tokens, evenly (DeepSpeed-MoE with capacity factor 1).

Shapes in docstrings: N tokens of the micro-batch, D hidden_size, F intermediate_size, H heads, E head_size, T
seq_length. Every size is for one rank.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from pretrain.active_extensions import extensions
from pretrain.model.description import ModelConfig

if TYPE_CHECKING:
    from pretrain.config.layout import Layout

T = TypeVar("T")
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
    fp16: bool = False  # the 16-bit type is fp16, and not bf16
    sequence_parallel_size: int = 1
    mlp_tiles: int = 1  # pieces in which the MLP is computed and recomputed
    model_extensions: tuple[str, ...] = ()  # that change its operators: see Extension.model
    keeps_norms: bool = False  # linear layers save the norms that they are given even where they could recompute them
    plain: bool = False  # --plain_operators
    compiled: bool = False  # --compile_blocks

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


@dataclass(frozen=True)
class NormMemory:
    """Bytes that a norm needs, for all vectors of a micro-batch."""

    extra: int  # what it saves beyond its input: statistics, copies
    keeps_input: bool = True  # it saves its input, which others may save, too; False: a copy, which `extra` counts
    is_recomputed: bool = False  # linear layers recompute the norm instead of saving it (kernels/norm.py)
    backward: int = 0  # allocated at the peak of its backward pass, beyond the gradient of its input


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes that attention needs, without its norms and the input of `qkv`."""

    saved: int  # by the attention, and by `out`
    backward: int  # allocated at the peak of its backward pass
    saves_output: bool = True  # attention itself saves its output; False: `out` alone does, and frees it earlier
    needs_masks: bool = True  # for windows and ALiBi, once for all blocks
    needs_document_masks: bool = True  # for the documents of each micro-batch, once for all blocks


@dataclass(frozen=True)
class LossMemory:
    """Bytes that the loss needs for a chunk of tokens, beyond its logits."""

    softmax: int
    copies: int  # number of copies of the hidden states while the gradient of the matrix is added in fp32


@dataclass(frozen=True)
class UpdateMemory:
    """Conversion of the gradients of ZeRO-1 and ZeRO-2 to fp32 for the optimizer."""

    is_one_pass: bool  # they are converted as they are concatenated
    most_elements: int | None  # that exist in fp32 at a time; None: all


class OperatorMemory:
    """Memory of an extension's implementations (Extension.operator_memory); None where it does not compute."""

    def norm(self, config: ModelConfig, batch: "MicroBatch", rows: int, size: int) -> NormMemory | None:
        """Return what a norm needs which has `rows` vectors of `size` elements for each token."""

    def attention(self, config: ModelConfig, batch: "MicroBatch", window: int) -> AttentionMemory | None:
        """Return what an attention needs. `window`: number of latest tokens that a query sees; 0: all."""

    def loss(self, config: ModelConfig, batch: "MicroBatch") -> LossMemory | None:
        """Return what head and loss need."""

    def update(self, layout: "Layout") -> UpdateMemory | None:
        """Return how gradients are converted to fp32."""

    def work(self, config: ModelConfig, batch: "MicroBatch") -> int:
        """Return bytes that exist during a product of a block in addition, where the extension changes the model."""
        return 0


@functools.cache
def _offered() -> tuple[OperatorMemory, ...]:
    return tuple(each.load(each.operator_memory)() for each in extensions() if each.operator_memory and not each.model)


@functools.cache
def _of_model_extension(name: str) -> OperatorMemory:
    make = next(each for each in extensions() if each.name == name).function("operator_memory")
    return OperatorMemory() if make is None else make()


def offered(ask: Callable[[OperatorMemory], T | None]) -> T | None:
    """Return the answer of the first extension that computes the operator; None: torch's operators do."""
    return next((found for each in _offered() if (found := ask(each)) is not None), None)


def added_work(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that exist during a product of a block in addition, in a model that extensions have changed."""
    return sum(_of_model_extension(name).work(config, batch) for name in batch.model_extensions)


def hidden_states_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the tensor [N, D] that one layer passes to the next, or of the shard of it that this rank holds."""
    return batch.shard_tokens * config.hidden_size * batch.element_bytes


def norm_saved(config: ModelConfig, batch: MicroBatch, *, shared_input: bool = False) -> int:
    """Bytes that a norm of [N, D] saves: its input and its statistics.

    Args:
        shared_input: another operator saves the same input, so it is not counted here.
    """
    shard = replace(batch, tokens=batch.shard_tokens)
    return norm_of_rows_saved(config, shard, 1, config.hidden_size, shared_input=shared_input)


def norm_of_rows_saved(config: ModelConfig, batch: MicroBatch, rows: int, size: int, *, shared_input: bool) -> int:
    """Bytes that a norm saves which has `rows` vectors of `size` elements for each token."""
    found = norm_memory(config, batch, rows, size)
    own_input = batch.tokens * rows * size * batch.element_bytes if found.keeps_input and not shared_input else 0
    return own_input + found.extra


def norm_memory(config: ModelConfig, batch: MicroBatch, rows: int = 1, size: int = 0) -> NormMemory:
    """Return what a norm needs which has `rows` vectors of `size` elements for each token; 0: [N, D].

    torch's RMSNorm on a CPU computes in fp32 and saves the converted input and the normalised input, both in fp32; its
    backward pass has four tensors in fp32. With norm_offset every device converts the input, and also saves the sum of
    weight and offset in fp32.
    """
    size = size or config.hidden_size
    found = offered(lambda memory: memory.norm(config, batch, rows, size))
    if found is not None:
        return found
    if config.norm != "rmsnorm":  # mean and reciprocal standard deviation of each vector
        return NormMemory(batch.tokens * 2 * rows * (FP32 if batch.cuda else batch.element_bytes))
    width, compiled = rows * size, batch.compiled and batch.cuda  # converts again in the backward pass
    converts = batch.element_bytes != FP32 and bool(config.norm_offset or not batch.cuda) and not compiled
    copies = (1 if converts else 0) + (0 if batch.cuda else 1)
    offset_weight = size * FP32 if config.norm_offset and not compiled else 0
    return NormMemory(batch.tokens * (copies * width + rows) * FP32 + offset_weight, keeps_input=not converts,
                      backward=0 if batch.cuda else 4 * batch.tokens * width * FP32)


def recomputes_norms(config: ModelConfig, batch: MicroBatch) -> bool:
    """Return whether `qkv` and a dense MLP recompute the norm before them instead of saving it (kernels/norm.py)."""
    shares_with_tiles = config.shared_norm and batch.mlp_tiles > 1
    return config.pre_norm and batch.tensor_parallel_size == 1 and norm_memory(config, batch).is_recomputed \
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


def query_width(config: ModelConfig, batch: MicroBatch) -> int:
    """Elements of one token's queries on this rank, H * E."""
    return config.num_heads * config.head_size // batch.tensor_parallel_size


def qkv_width(config: ModelConfig, batch: MicroBatch) -> int:
    """Elements of one token's queries, keys and values on this rank: the output width of `qkv`."""
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_size // batch.tensor_parallel_size


def qkv_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the output of `qkv`, and of its gradient."""
    return batch.tokens * qkv_width(config, batch) * batch.element_bytes


def mlp_saved(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes that a dense MLP saves.

    These are its inner tensors [N, F] unless tiles are recomputed, and its input [N, D] unless that is recomputed.
    """
    if batch.mlp_tiles > 1:
        return hidden_states_bytes(config, batch)
    return mlp_inner(config, batch) + (0 if recomputes_norms(config, batch) else column_input_bytes(config, batch))


def mlp_inner(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the inner tensors of a dense MLP that its backward pass needs, of all tiles together."""
    return _inner_saved(config, config.intermediate_size // batch.tensor_parallel_size, batch)


def column_input_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the input [N, D] that `qkv` and a dense MLP save: of the rank's shard, or where torch's own operators
    multiply, of the gathered sequences (layers/linear.py, column_products).
    """
    tokens = batch.tokens if saves_inner(batch) else batch.shard_tokens
    return tokens * config.hidden_size * batch.element_bytes


def saves_inner(batch: MicroBatch) -> bool:
    """Return whether the last product of a dense MLP saves its input: a custom kernel recomputes it."""
    return batch.plain or (batch.compiled and batch.cuda)


def _inner_saved(config: ModelConfig, inner: int, batch: MicroBatch) -> int:
    """Bytes of the outputs of `up` and `gate`, [N, inner] each. model/kernels/activation.py recomputes the rest.

    With torch's own operators and in a compiled block, the last product saves its input, too. Without a gate, relu
    then needs nothing else; with a gate, plain autograd also saves the activated gate.
    """
    tensors = 2 if config.gated_mlp else 1
    if saves_inner(batch):
        keeps_input = config.gated_mlp or config.activation != "relu"
        tensors += (2 if batch.plain and config.gated_mlp else 1) if keeps_input else 0
    return tensors * batch.tokens * inner * batch.element_bytes


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
    inner = _inner_saved(config, config.moe_intermediate_size, replace(sent, plain=batch.plain and not batch.cuda))
    shared = _inner_saved(config, config.shared_expert_size // batch.tensor_parallel_size, batch)
    if config.shared_expert_gate:  # its output, and the shared expert's
        shared += linear_saved(1, shard) + linear_saved(config.hidden_size, shard)
    return router + 2 * linear_saved(config.hidden_size, sent) + inner + shared
