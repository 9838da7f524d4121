"""The description of a model: its sizes, and from them each layer with its parameters. Imports no torch.

What the rest of the program needs to know about a model is said here once, and asked for where it is used:

- `ModelConfig` has the sizes and choices of a decoder-only transformer. config.py reads it from a config.json.
- `ModelConfig.layers()` lists the layers in the order in which they compute. A `Layer` has its kind, what
  distinguishes it from others of its kind (window, experts), and its parameters in the order of registration.
- A `Parameter` has its name inside the layer, its shape, and how ranks divide it: tensor-parallel ranks along
  `split_dim`, each of the `segments` by itself, expert-parallel ranks by experts. Matrices (`is_matrix`) have weight
  decay and are the operands of the layer's products; vectors are biases and weights of norms.

These are queries on the description:

| question | answer |
| --- | --- |
| the torch parameters of a layer | parameters.py, `create_parameters`: layers/ creates parameters in no other way |
| names in checkpoints, complete shapes, parts of a rank | `named_parameters`, parameters.py, `part_of_rank` |
| names in transformers, and conversions | hf_names.py, `tensor_rules`, with the names that each family gives |
| number of parameters, FLOPs, costs of pipeline stages | `num_parameters`, flops.py, partition.py |
| what a layer keeps for the backward pass | operator_memory.py and attention_memory.py; their sum: layer_memory.py |
| memory and predicted time of a layout | pretrain/memory/, which has no other description of a model |

What only the code of a model can say is asked of `ModelConfig.implementation` (implementation.py): its layers are those
of a family (family_model.py), or those of a decoder of transformers that is wrapped. The queries are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.model.implementation import Implementation


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layer."""

    name: str  # inside the layer, such as "attention.qkv.weight"
    shape: tuple[int, ...]  # of the complete parameter; matrices are [outputs, inputs] or [rows, hidden_size]
    split_dim: int | None = None  # dimension that tensor-parallel ranks divide; None: each rank has all of it
    segments: tuple[int, ...] = ()  # sizes of the parts of that dimension of which each rank has a range
    experts_per_token: int = 0  # above 0: the first dimension counts experts, and a token passes this many of them
    is_frozen: bool = False  # no gradient and no weight decay: sinusoidal positions of a wrapped layer
    active: int | None = None  # of a wrapped layer with experts: elements that process a token

    @property
    def is_expert(self) -> bool:
        """Return whether the parameter stacks the matrices of all experts, which expert-parallel ranks divide."""
        return self.experts_per_token > 0

    @property
    def is_matrix(self) -> bool:
        """Return whether it has two or more dimensions; if so, weight decay applies (engine/optimizer.py)."""
        return len(self.shape) >= 2

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def active_size(self) -> int:
        """Number of elements that process a token: of the experts, only the ones that the router chooses."""
        if self.active is not None:
            return self.active
        return self.size * self.experts_per_token // self.shape[0] if self.is_expert else self.size


Parameters = Mapping[str, Parameter]  # by name


def inside(parameters: Parameters, module: str) -> dict[str, Parameter]:
    """Return the parameters of a module by their names inside the module; {} if the layer has no such module."""
    prefix = f"{module}."
    return {name.removeprefix(prefix): each for name, each in parameters.items() if name.startswith(prefix)}


@dataclass(frozen=True, eq=False)  # equal blocks of a model are one object, so that comparing them is fast
class Layer:
    """One layer of the model, as layer_specs.py builds it."""

    kind: str  # embedding, positions, block, norm, head
    class_name: str  # in layers/; a tied head is a second TokenEmbedding
    parameters: tuple[Parameter, ...]
    tied: bool = False  # whether embedding and head share the matrix
    window: int = 0  # of a block: number of latest tokens that a query sees, with its own; 0: all tokens
    has_experts: bool = False  # of a block: experts instead of an MLP
    their_names: tuple[str, ...] = ()  # of a wrapped layer: names of its parameters in transformers' model
    # buffers of a wrapped layer that belong to the model's state, and their names in transformers' model
    buffers: tuple[Parameter, ...] = ()
    their_buffers: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def active_size(self) -> int:
        """Elements that process a token."""
        return sum(parameter.active_size for parameter in self.parameters)

    def by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are numbers of elements, dropouts are probabilities."""

    architecture: str  # model_type of the config.json, and family of the tensor names in an export
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_positions: int  # tokens
    norm: str  # "layernorm" (weight and bias) or "rmsnorm" (weight)
    norm_eps: float
    activation: str  # "gelu", "gelu_tanh", "silu", "relu" or "relu2" (relu, squared)
    gated_mlp: bool  # activation(gate(x)) * up(x) instead of activation(up(x))
    position: str  # "learned", "rope" or "alibi"
    initializer_range: float  # standard deviation of the initial matrices
    hf_config: dict[str, Any] = field(hash=False)  # the config.json with overrides applied
    # field -> key of the config.json, where the two differ
    key_names: Mapping[str, str] = field(hash=False, compare=False)
    implementation: "Implementation" = field(hash=False, repr=False)  # the code of the model
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tie_word_embeddings: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    scale_residual_init: bool = False  # divide by sqrt(2 * num_layers) for projections into the residual stream
    # norms
    norm_bias: bool = True  # of a layernorm
    norm_offset: float = 0.0  # the norm multiplies by weight + norm_offset; Gemma: 1
    pre_norm: bool = True  # norms of the inputs of attention and MLP: norm1, norm2
    post_norm: bool = False  # norms of the outputs of attention and MLP: post_norm1, post_norm2
    shared_norm: bool = False  # with parallel_residual: norm1 is also the norm of the MLP's input
    embedding_norm: bool = False  # norm of the embeddings (BLOOM)
    qk_norm: str = ""  # norm of queries and keys: "" none; "head" over each head (Qwen3); "all" over all heads (OLMo-2)
    # positions
    rope_theta: float = 0.0
    rotary_size: int = 0  # number of elements of a head that rotate, from the first; 0 without rope
    # {"rope_type": "linear" | "dynamic" | "llama3" | "yarn", ...}
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    local_rope_theta: float = 0.0  # rope_theta, without scaling, of layers with a window; 0: as other layers (Gemma 3)
    windows: tuple[int, ...] = ()  # per layer: number of latest tokens that a query sees, with its own; 0: all tokens
    # residual stream, attention and logits
    parallel_residual: bool = False  # x + attention(norm1(x)) + mlp(norm2(x))
    attention_scale: float = 0.0  # factor of the attention scores; 0: 1 / sqrt(head_size)
    attention_softcap: float = 0.0  # scores become cap * tanh(scores / cap); 0: no cap (Gemma 2)
    logit_softcap: float = 0.0  # the same for the logits
    embedding_scale: float = 1.0  # factor of the embeddings (Gemma: sqrt(hidden_size))
    # mixture of experts
    num_experts: int = 0  # of each block with experts; 0: no block has any
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # inner size of one expert
    norm_topk_prob: bool = False  # divide the probabilities of a token's experts by their sum
    shared_expert_size: int = 0  # inner size of the expert that computes every token; 0: none
    shared_expert_gate: bool = False  # multiply the shared expert's output by sigmoid(gate(x))
    dense_layers: frozenset[int] = frozenset()  # in a model with experts: indices of the blocks that have an MLP
    router_aux_loss: float = 0.0  # coefficient of the load-balancing loss
    padding_token: int | None = None  # of a wrapped model: the token whose vector transformers does not train

    def key(self, name: str) -> str:
        """Return the config.json key of a field, such as `n_layer` for `num_layers` of gpt2."""
        return self.key_names.get(name, name)

    def longest_sequence(self) -> int:
        """Return the largest sequence length in tokens: max_positions, and no limit with the rope_type "dynamic"."""
        dynamic = self.rope_scaling is not None and self.rope_scaling["rope_type"] == "dynamic"
        return 2**31 - 1 if dynamic else self.max_positions

    def window(self, index: int) -> int:
        """Return the attention window of block `index` in tokens; 0: all tokens."""
        return self.windows[index] if self.windows else 0

    def has_experts(self, index: int) -> bool:
        """Return whether block `index` has experts instead of an MLP."""
        return self.num_experts > 0 and index not in self.dense_layers

    def num_moe_layers(self) -> int:
        """Return the number of blocks with experts."""
        return sum(self.has_experts(index) for index in range(self.num_layers)) if self.num_experts else 0

    def layers(self) -> tuple[Layer, ...]:
        """List the layers: embedding, its norm and learned positions if any, blocks, final norm, head."""
        return self.implementation.layers(self)

    def blocks(self) -> tuple[Layer, ...]:
        """List the blocks."""
        return tuple(layer for layer in self.layers() if layer.kind == "block")

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters with their names in the model and in checkpoints. A tied matrix occurs once."""
        return ((name, parameter) for name, parameter, _, _ in self.placed_parameters())

    def placed_parameters(self) -> Iterator[tuple[str, Parameter, Layer, int]]:
        """Yield what `named_parameters` yields, with the layer, and the number of blocks before this layer."""
        blocks = 0
        for index, layer in enumerate(self.layers()):
            if layer.kind == "head" and layer.tied:
                continue
            prefix = "tied_modules.embed" if layer.tied else str(index)
            yield from ((f"{prefix}.{parameter.name}", parameter, layer, blocks) for parameter in layer.parameters)
            blocks += layer.kind == "block"

    def their_names(self) -> Iterator[str]:
        """Yield the names in transformers' model of the parameters of wrapped layers, as `named_parameters` does."""
        for layer in self.layers():
            if layer.kind != "head" or not layer.tied:
                yield from layer.their_names

    def named_buffers(self) -> Iterator[tuple[str, str, Parameter]]:
        """Yield the buffers of wrapped layers with their names in checkpoints and in transformers' model."""
        for index, layer in enumerate(self.layers()):
            for buffer, theirs in zip(layer.buffers, layer.their_buffers, strict=True):
                yield f"{index}.{buffer.name}", theirs, buffer

    def num_parameters(self, *, active: bool = False) -> int:
        """Return the number of all parameters; `active`: without the experts that a token does not use.

        A tied matrix counts once.
        """
        layers = self.layers()[:-1] if self.tie_word_embeddings else self.layers()
        return sum(layer.active_size if active else layer.size for layer in layers)

    def parameters_text(self) -> str:
        """Return the number of parameters for a message, with the number of active ones if there are experts."""
        active = f" ({self.num_parameters(active=True):,} active)" if self.has_active_parameters else ""
        return f"{self.num_parameters():,} parameters{active}"

    @property
    def has_active_parameters(self) -> bool:
        """Return whether a token passes only some of the parameters: those of the experts that the router chooses."""
        return any(layer.active_size < layer.size for layer in self.blocks())


def local_kv_heads(num_heads: int, num_kv_heads: int, size: int) -> int:
    """Return the key/value heads that each of `size` ranks needs for its num_heads / size query heads.

    All of its key/value heads must belong to equally many of its query heads, as attention assumes. Where the ranks do
    not divide the key/value heads, some are repeated: on several ranks, or on one rank.
    """
    own_heads = num_heads // size
    return own_heads // gcd(num_heads // num_kv_heads, own_heads)
