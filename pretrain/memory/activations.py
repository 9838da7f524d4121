"""What autograd keeps for the backward pass, in bytes: one small function for each operator of `pretrain/model`.

The CPU figures were measured with `torch.autograd.graph.saved_tensors_hooks` on the real layers, storages counted once
(tests/test_memory_estimate.py does it again). The CUDA ones are derived from torch's formulas, not measured: flash
attention keeps q, k, v, its output and the logarithms of the softmax's sums; dropout keeps a byte an element;
LayerNorm keeps its statistics in fp32; RMSNorm is one kernel that keeps its input.

Tensor parallelism divides what Megatron's does without its sequence parallelism (Korthikanti and others, arXiv
2205.05198, table 2: s b h (10 + 24 / t) a layer): the inner tensors of attention and MLP, not the norms' and the
dropouts'. Ulysses (arXiv 2309.14509) divides everything by the ranks of a sequence: tokens outside attention, heads
inside. Experts see `experts_per_token` times the tokens, evenly (DeepSpeed-MoE at capacity factor 1).
"""

from dataclasses import dataclass

from pretrain.memory.layout import Layout
from pretrain.memory.shape import Layer, ModelShape

_FP32, _INT64 = 4, 8


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank."""

    tokens: int  # of this rank: samples x positions / ranks that share a sequence
    seq_length: int  # positions of a whole sample
    element: int  # bytes of an activation
    cuda: bool
    tensor_parallel_size: int = 1

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout mask: the CPU keeps the noise itself, in the activation's dtype."""
        return 1 if self.cuda else self.element


def pass_of(layout: Layout) -> Pass:
    """The micro-batch of a layout."""
    tokens = -(-layout.micro_batch_size * layout.seq_length // layout.sequence_parallel_size)
    return Pass(tokens, layout.seq_length, layout.element_bytes, layout.device_kind == "cuda",
                layout.tensor_parallel_size)


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
    heads = shape.num_heads * shape.head_size // one.tensor_parallel_size
    core = _flash_kept(shape, one) if one.cuda or not shape.attention_dropout else _plain_attention_kept(shape, one)
    copies_output = not one.cuda and (shape.position == "rope" or shape.attention_dropout > 0)
    return linear_kept(shape.hidden_size, one) + core + (linear_kept(heads, one) if copies_output else 0)


def _flash_kept(shape: ModelShape, one: Pass) -> int:
    """q, k, v, the output (which `out` keeps too, in the same storage, unless the CPU's has another order after
    rotation), and fp32 logarithms of the sums. q, k and v are views of what `qkv` returned; rotated q and k are new
    tensors, beside the whole of it, as v is still a view.
    """
    heads, kv_heads = shape.num_heads / one.tensor_parallel_size, shape.num_kv_heads / one.tensor_parallel_size
    rows = (2 * heads + 2 * kv_heads) * shape.head_size
    rotated = (heads + kv_heads) * shape.head_size if shape.position == "rope" else 0
    return round(one.tokens * ((rows + rotated) * one.element + heads * _FP32))


def _plain_attention_kept(shape: ModelShape, one: Pass) -> int:
    """With dropout the CPU has no fused attention: fp32 q, k and v of all heads, and [T, T] three times: the softmax,
    the noise and their product."""
    heads = shape.num_heads / one.tensor_parallel_size
    return round(one.tokens * heads * (3 * shape.head_size + 3 * one.seq_length) * _FP32)


def mlp_kept(shape: ModelShape, one: Pass) -> int:
    """Up, activation function, down; gated: gate, activation function, up, their product."""
    inner = shape.intermediate_size // one.tensor_parallel_size
    return linear_kept(shape.hidden_size, one) + inner_kept(shape, inner, one)


def inner_kept(shape: ModelShape, inner: int, one: Pass) -> int:
    """What the activation function, the product with the gate and `down` keep of [tokens, inner]."""
    return (4 if shape.gated_mlp else 2) * one.tokens * inner * one.element


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
    return norm_kept(shape, one) if layer.kind == "norm" else linear_kept(shape.hidden_size, one)


def boundary_bytes(shape: ModelShape, one: Pass) -> int:
    """What passes between layers: [tokens, D]."""
    return one.tokens * shape.hidden_size * one.element


def input_bytes(shape: ModelShape, layer: Layer, one: Pass) -> int:
    """What goes into a layer: all that a recomputed group that begins with it keeps."""
    return one.tokens * _INT64 if layer.kind == "embedding" else boundary_bytes(shape, one)


def logits_bytes(shape: ModelShape, one: Pass) -> int:
    """The logits as the model computes them: [tokens, V]."""
    return round(one.tokens * shape.vocab_size / one.tensor_parallel_size) * one.element


def loss_kept(shape: ModelShape, one: Pass) -> int:
    """The loss (model/loss.py): fp32 logarithms of the softmax, labels, weights."""
    return round(one.tokens * shape.vocab_size / one.tensor_parallel_size) * _FP32 + one.tokens * (_INT64 + _FP32)


def loss_peak(shape: ModelShape, one: Pass) -> int:
    """The most that the loss needs at once, the logits themselves left out: in its backward pass what it kept, the fp32
    gradient of that, and the fp32 gradient of the logits."""
    return loss_kept(shape, one) + 2 * round(one.tokens * shape.vocab_size / one.tensor_parallel_size) * _FP32


def block_backward(shape: ModelShape, one: Pass) -> int:
    """What a block's backward pass needs at once beyond what the block kept: the gradient of the residual stream, and
    those before and after the MLP's activation function, less what `down` has let go. Attention without a fused kernel
    has its [T, T] gradients after the MLP has let everything go."""
    residual = boundary_bytes(shape, one)
    experts = max(1, shape.experts_per_token) if shape.num_experts else 1
    width = shape.moe_intermediate_size * experts if shape.num_experts else shape.intermediate_size
    mlp = (2 if shape.gated_mlp else 1) * one.tokens * (width // one.tensor_parallel_size) * one.element
    if one.cuda or not shape.attention_dropout:
        return residual + mlp
    scores = round(one.tokens * one.seq_length * shape.num_heads / one.tensor_parallel_size) * _FP32
    return residual + max(mlp, scores - mlp_kept(shape, one) - norm_kept(shape, one))
