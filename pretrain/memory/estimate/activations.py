"""What autograd keeps for the backward pass, in bytes: one small function for each operator of `pretrain/model`.

The CPU figures were measured with `torch.autograd.graph.saved_tensors_hooks` on the real layers, storages counted once
(tests/memory/test_estimate.py does it again). The CUDA ones are derived from torch's formulas, not measured: flash
attention keeps q, k, v, its output and the logarithms of the softmax's sums; dropout keeps a byte an element;
LayerNorm keeps its statistics in fp32; RMSNorm is one kernel that keeps its input. `--compile_blocks` is left out: what
a compiled block keeps is the compiler's choice.

Tensor parallelism divides what Megatron's does without its sequence parallelism (Korthikanti and others, arXiv
2205.05198, table 2: s b h (10 + 24 / t) a layer): the inner tensors of attention and MLP, not the norms' and the
dropouts'. Ulysses (arXiv 2309.14509) divides everything by the ranks of a sequence: tokens outside attention, heads
inside. Experts see `experts_per_token` times the tokens, evenly (DeepSpeed-MoE at capacity factor 1).
"""

from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import Layer, ModelShape

_FP32, _INT64 = 4, 8
LOSS_TOKENS = 1024  # whose logits exist at a time (model/fused_loss.py)
CPU_ELEMENTS = 2**20  # that the CPU takes a softmax of at a time, for each thread: one thread is counted here
ATTENTION_ROWS = 128  # of queries at a time (model/cpu_attention.py)


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank."""

    tokens: int  # of this rank: samples x positions / ranks that share a sequence
    seq_length: int  # positions of a whole sample
    element: int  # bytes of an activation
    cuda: bool
    tensor_parallel_size: int = 1
    fp16: bool = False  # has torch's attention on CPUs, where bf16 has one of its own (model/cpu_attention.py)

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout mask: the CPU keeps the noise itself, in the activation's dtype."""
        return 1 if self.cuda else self.element

    @property
    def samples(self) -> int:
        """At least one."""
        return max(1, self.tokens // self.seq_length)


def pass_of(layout: Layout) -> Pass:
    """The micro-batch of a layout."""
    tokens = -(-layout.micro_batch_size * layout.seq_length // layout.sequence_parallel_size)
    return Pass(tokens, layout.seq_length, layout.element_bytes, layout.device_kind == "cuda",
                layout.tensor_parallel_size, layout.precision == "fp16")


def norm_kept(shape: ModelShape, one: Pass, *, shared_input: bool = False) -> int:
    """A norm of [tokens, D]: its input and statistics. RMSNorm on the CPU computes in fp32, and keeps the input and the
    normalised input in it.

    Args:
        shared_input: another operator keeps the same input.
    """
    hidden = shape.hidden_size
    own = 0 if shared_input else hidden * one.element
    if shape.norm == "rmsnorm":
        if one.cuda:
            return one.tokens * (own + _FP32)
        converted = hidden * _FP32 if one.element != _FP32 else own
        return one.tokens * (converted + hidden * _FP32 + _FP32)
    return one.tokens * (own + 2 * (_FP32 if one.cuda else one.element))


def linear_kept(inputs: int, one: Pass) -> int:
    """A matrix product of [tokens, inputs] with a weight: its input."""
    return one.tokens * inputs * one.element


def dropout_kept(probability: float, width: int, one: Pass) -> int:
    """Dropout of [tokens, width]: the mask."""
    return one.tokens * width * one.mask if probability > 0 else 0


def attention_kept(shape: ModelShape, one: Pass) -> int:
    """Causal attention without its norm: the input of `qkv`, of the core, and of `out`."""
    if not one.cuda and shape.attention_dropout:
        core = _plain_attention_kept(shape, one) + linear_kept(_heads(shape, one), one)
    elif _is_own(shape, one):
        core = _inputs_kept(shape, one) + linear_kept(_heads(shape, one), one)
    else:
        core = _flash_kept(shape, one)
    return linear_kept(shape.hidden_size, one) + core


def _is_own(shape: ModelShape, one: Pass) -> bool:
    """Whether attention is that of model/cpu_attention.py."""
    return not one.cuda and one.element == 2 and not one.fp16 and not shape.attention_dropout


def _heads(shape: ModelShape, one: Pass) -> int:
    """Elements of a token's queries."""
    return shape.num_heads * shape.head_size // one.tensor_parallel_size


def _rows(shape: ModelShape, one: Pass) -> int:
    """Elements of a token's queries, keys and values: the rows of `qkv`."""
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size // one.tensor_parallel_size


def _inputs_kept(shape: ModelShape, one: Pass) -> int:
    """q, k and v, views of what `qkv` returned; rotated q and k are new tensors, beside the whole of it, as v is still
    a view."""
    heads = shape.num_heads + shape.num_kv_heads
    rotated = heads * shape.head_size // one.tensor_parallel_size if shape.position == "rope" else 0
    return one.tokens * (_rows(shape, one) + rotated) * one.element


def _flash_kept(shape: ModelShape, one: Pass) -> int:
    """torch's fused attention: its inputs, fp32 logarithms of the sums, and the output (which `out` keeps too, in the
    same storage, unless the CPU's has another order after rotation)."""
    outputs = 2 if not one.cuda and shape.position == "rope" else 1
    sums = round(one.tokens * shape.num_heads / one.tensor_parallel_size) * _FP32
    return _inputs_kept(shape, one) + outputs * linear_kept(_heads(shape, one), one) + sums


def _plain_attention_kept(shape: ModelShape, one: Pass) -> int:
    """With dropout the CPU has no fused attention: fp32 q, k and v of all heads, and [T, T] three times: the softmax,
    the noise and their product."""
    heads = shape.num_heads / one.tensor_parallel_size
    return round(one.tokens * heads * (3 * shape.head_size + 3 * one.seq_length) * _FP32)


def mlp_kept(shape: ModelShape, one: Pass) -> int:
    """Up, activation function, down; gated: gate, activation function, up, their product, down."""
    inner = shape.intermediate_size // one.tensor_parallel_size
    return linear_kept(shape.hidden_size, one) + inner_kept(shape, inner, one)


def inner_kept(shape: ModelShape, inner: int, one: Pass) -> int:
    """What comes out of up and gate, [tokens, inner]: the rest is computed anew (model/activation.py)."""
    return (2 if shape.gated_mlp else 1) * one.tokens * inner * one.element


def experts_kept(shape: ModelShape, one: Pass) -> int:
    """Router (input and fp32 probabilities), the tokens sent to experts, their inner tensors, and what comes back."""
    sent = Pass(one.tokens * shape.experts_per_token, one.seq_length, one.element, one.cuda, one.tensor_parallel_size)
    router = linear_kept(shape.hidden_size, one) + 2 * one.tokens * shape.num_experts * _FP32
    inner = inner_kept(shape, shape.moe_intermediate_size // one.tensor_parallel_size, sent)
    shared = inner_kept(shape, shape.shared_expert_size // one.tensor_parallel_size, one)
    return router + 2 * linear_kept(shape.hidden_size, sent) + inner + shared


def block_kept(shape: ModelShape, one: Pass, *, experts: bool = False) -> int:
    """One block: two norms (or one, or four), attention, MLP, and a dropout after each of the two."""
    norms = norm_kept(shape, one)
    for _ in range(1, shape.norms_per_block):
        norms += norm_kept(shape, one, shared_input=shape.parallel_residual)
    mlp = experts_kept(shape, one) if experts else mlp_kept(shape, one)
    if shape.norms_per_block == 1:  # attention and MLP have the same input
        mlp -= linear_kept(shape.hidden_size, one)
    return norms + attention_kept(shape, one) + mlp + 2 * dropout_kept(shape.residual_dropout, shape.hidden_size, one)


def layer_kept(shape: ModelShape, layer: Layer, one: Pass) -> int:
    """Any layer of the list."""
    if layer.kind == "block":
        return block_kept(shape, one, experts=any(tensor.expert for tensor in layer.tensors))
    if layer.kind == "embedding":
        rope = shape.position != "learned"
        return one.tokens * _INT64 + (dropout_kept(shape.embedding_dropout, shape.hidden_size, one) if rope else 0)
    if layer.kind == "positions":
        return dropout_kept(shape.embedding_dropout, shape.hidden_size, one)
    return norm_kept(shape, one) if layer.kind == "norm" else loss_kept(shape, one)


def boundary_bytes(shape: ModelShape, one: Pass) -> int:
    """What passes between layers: [tokens, D]."""
    return one.tokens * shape.hidden_size * one.element


def input_bytes(shape: ModelShape, layer: Layer, one: Pass) -> int:
    """What goes into a layer: all that a recomputed group that begins with it keeps."""
    return one.tokens * _INT64 if layer.kind == "embedding" else boundary_bytes(shape, one)


def own_input_bytes(shape: ModelShape, layer: Layer, one: Pass) -> int:
    """Of what an embedding or a block keeps, its input itself."""
    if layer.kind == "block" and shape.norm == "rmsnorm" and not one.cuda and one.element != _FP32:
        return 0  # only in fp32
    return 0 if layer.kind == "positions" else input_bytes(shape, layer, one)


def logits_bytes(shape: ModelShape, one: Pass) -> int:
    """The logits that exist at a time: of a chunk of tokens."""
    return min(one.tokens, LOSS_TOKENS) * (shape.vocab_size // one.tensor_parallel_size) * one.element


def loss_kept(shape: ModelShape, one: Pass) -> int:
    """Head and loss (model/fused_loss.py): the gradients of the hidden states and of the matrix, which the forward pass
    computes already; labels and weights."""
    weight = shape.hidden_size * (shape.vocab_size // one.tensor_parallel_size) * one.element
    return boundary_bytes(shape, one) + weight + one.tokens * (_INT64 + _FP32)


def loss_peak(shape: ModelShape, one: Pass) -> int:
    """The most that head and loss need at once in the forward pass, their input left out: beside what they keep a
    chunk's logits, and either their softmax in fp32 or the chunk's hidden states times the tokens' weights.

    The softmax is taken of as many rows at a time as stay in a CPU's cache, those before them still there.
    """
    vocab, converts = shape.vocab_size // one.tensor_parallel_size, one.element != _FP32
    chunk = min(one.tokens, LOSS_TOKENS)
    rows = chunk if one.cuda else min(chunk, max(1, CPU_ELEMENTS // vocab))
    softmax = max((1 + converts) * rows, rows + (1 + converts) * min(rows, chunk - rows)) * vocab * _FP32
    weighted = chunk * shape.hidden_size * (_FP32 + (one.element if converts else 0))
    return loss_kept(shape, one) + 2 * one.tokens * _FP32 + logits_bytes(shape, one) + max(softmax, weighted)


def loss_backward(shape: ModelShape, one: Pass) -> int:
    """What the loss's backward pass needs beside what it kept and the gradient of the matrix: the gradient of its
    input, which is first computed in fp32, before that of the matrix."""
    weight = shape.hidden_size * (shape.vocab_size // one.tensor_parallel_size) * one.element
    converted = one.tokens * shape.hidden_size * _FP32 if one.element != _FP32 else 0
    return boundary_bytes(shape, one) + max(0, converted - weight)


def block_backward(shape: ModelShape, one: Pass) -> int:
    """What a block's backward pass needs at once beyond what the block kept: the gradient of the residual stream, and
    what the MLP computes anew and the gradients of its inner tensors, or, after the MLP has let go what it kept,
    the gradients within attention."""
    residual = boundary_bytes(shape, one) * (2 if shape.residual_dropout > 0 else 1)
    experts = max(1, shape.experts_per_token) if shape.num_experts else 1
    width = shape.moe_intermediate_size * experts if shape.num_experts else shape.intermediate_size
    mlp = (3 if shape.gated_mlp else 2) * one.tokens * (width // one.tensor_parallel_size) * one.element
    let_go = mlp_kept(shape, one) + norm_kept(shape, one)
    if _is_own(shape, one):  # keeps no output: `out` alone does
        let_go += linear_kept(_heads(shape, one), one)
    return residual + max(mlp, _attention_backward(shape, one) - let_go)


def _attention_backward(shape: ModelShape, one: Pass) -> int:
    """The gradients of attention's output and of q, k and v, with what it works in; or the latter twice, as they are
    put together for `qkv`. Without a fused kernel it has a gradient [T, T] in fp32."""
    if not one.cuda and shape.attention_dropout:
        return round(one.tokens * one.seq_length * shape.num_heads / one.tensor_parallel_size) * _FP32
    rows = one.tokens * _rows(shape, one) * one.element
    work = _own_attention_work(shape, one) if _is_own(shape, one) else 0
    return max(linear_kept(_heads(shape, one), one) + rows + work, 2 * rows)


def _own_attention_work(shape: ModelShape, one: Pass) -> int:
    """Of the samples that are at work at once: k and v in the order of heads, and their gradients in fp32; of a block
    of rows of all heads, queries, outputs' gradients, and scores, probabilities and their gradients, those of the block
    before among them, or what is added to the gradient of k.
    """
    heads, kv_heads = shape.num_heads / one.tensor_parallel_size, shape.num_kv_heads / one.tensor_parallel_size
    samples = min(one.samples, max(1, int(CPU_ELEMENTS // (heads * ATTENTION_ROWS * one.seq_length))))
    rows, before = min(ATTENTION_ROWS, one.seq_length), max(0.0, 1 - ATTENTION_ROWS / one.seq_length)
    keys = kv_heads * one.seq_length * shape.head_size
    scores = heads * rows * one.seq_length
    scores = max((3 + before) * scores, (2 + 3 * before) * scores, 3 * scores + keys)
    queries = 2 * heads * rows * shape.head_size
    return round(samples * ((scores + queries + 2 * keys) * one.element + 2 * keys * _FP32)) \
        + ATTENTION_ROWS**2 * one.element
