"""What memory and FLOPs depend on in a model: its sizes, and every parameter by layer of the pipeline's list.

Imports neither torch nor transformers.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pretrain.errors import ConfigError
from pretrain.memory.estimate.other_architectures import ARCHITECTURES
from pretrain.model.config import ModelConfig, find_config, model_config_from
from pretrain.model.config_keys import KEYS, read_config_json


@dataclass(frozen=True)
class Tensor:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    split: str = ""  # how tensor parallelism divides it: "rows", "columns", "" (every rank has all of it)
    expert: bool = False  # divided over the expert-parallel ranks

    @cached_property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is in the parameter group with weight decay (see optimizer.py)."""
        return len(self.shape) >= 2


@dataclass(frozen=True, eq=False)  # equal blocks of a shape are one object: compared often, and so quickly
class Layer:
    """One entry of the list of layer specs."""

    kind: str  # embedding, positions, block, norm, head
    tensors: tuple[Tensor, ...]
    tied: bool = False  # its matrix is the model's one and only, shared with another layer

    @cached_property
    def size(self) -> int:
        """Elements of all its parameters."""
        return sum(tensor.size for tensor in self.tensors)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are numbers of elements, dropouts are probabilities."""

    architecture: str  # transformers' model_type
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int  # of a dense MLP
    max_positions: int
    activation: str = "silu"  # gelu, gelu_tanh, silu, relu, relu2
    gated_mlp: bool = True
    norm: str = "rmsnorm"  # layernorm (weight and bias), rmsnorm (weight), none (no parameters)
    norms_per_block: int = 2
    qk_norm_size: int = 0  # elements of the norms of queries and keys of a block, together
    embedding_norm: bool = False
    position: str = "rope"  # learned, rope, none
    position_rows: int = 0  # of a learned table
    rotary_size: int = 0
    parallel_residual: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tie_word_embeddings: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # of one expert
    shared_expert_size: int = 0  # inner size of the expert that every token passes
    shared_expert_gate: bool = False
    dense_layers: frozenset[int] = frozenset()  # of a model with experts: the blocks that have none
    untrainable_reason: str = ""  # why this project does not train it; "": it does

    def layers(self) -> tuple[Layer, ...]:
        """As build_specs lists them, with the tensors in their order of registration."""
        return _layers(self)

    def num_parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        return sum(layer.size for layer in self.layers()) - (self.layers()[-1].size if self.tie_word_embeddings else 0)

    def active_parameters(self) -> int:
        """Those that a token passes: all but the experts that are not chosen for it."""
        idle = self.num_experts - self.experts_per_token
        expert = 3 if self.gated_mlp else 2
        per_block = idle * expert * self.hidden_size * self.moe_intermediate_size
        return self.num_parameters() - per_block * self.num_moe_layers()

    def num_moe_layers(self) -> int:
        """Blocks with experts."""
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    def has_experts(self, index: int) -> bool:
        """Whether block `index` has experts."""
        return self.num_experts > 0 and index not in self.dense_layers


@lru_cache(maxsize=256)
def _layers(shape: ModelShape) -> tuple[Layer, ...]:
    embedding = Tensor("embedding", (shape.vocab_size, shape.hidden_size), "rows")
    first = (embedding, *(_norm(shape, "norm") if shape.embedding_norm else ()))
    layers = [Layer("embedding", first, tied=shape.tie_word_embeddings)]
    if shape.position == "learned":
        layers.append(Layer("positions", (Tensor("embedding", (shape.position_rows, shape.hidden_size)),)))
    layers += [_block(shape, shape.has_experts(index)) for index in range(shape.num_layers)]
    layers.append(Layer("norm", _norm(shape, "norm")))
    if shape.tie_word_embeddings:
        return (*layers, Layer("head", (embedding,), tied=True))
    head = _linear("lm_head", shape.hidden_size, shape.vocab_size, shape.head_bias, "rows")
    return (*layers, Layer("head", head))


@lru_cache(maxsize=512)
def _block(shape: ModelShape, experts: bool) -> Layer:
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_size
    rows = heads + 2 * shape.num_kv_heads * shape.head_size
    norms = [tensor for index in range(shape.norms_per_block) for tensor in _norm(shape, f"norm{index + 1}")]
    half = len(norms) // 2 if shape.norms_per_block > 1 else len(norms)
    attention = (*_linear("attention.qkv", hidden, rows, shape.qkv_bias, "rows"),
                 *((Tensor("attention.qk_norm", (shape.qk_norm_size,)),) if shape.qk_norm_size else ()),
                 *_linear("attention.out", heads, hidden, shape.attention_out_bias, "columns"))
    mlp = _experts(shape) if experts else _mlp(shape, "mlp", shape.intermediate_size)
    return Layer("block", (*norms[:half], *attention, *norms[half:], *mlp))


def _norm(shape: ModelShape, name: str) -> tuple[Tensor, ...]:
    vector = (shape.hidden_size,)
    parts = {"layernorm": ("weight", "bias"), "rmsnorm": ("weight",), "none": ()}[shape.norm]
    return tuple(Tensor(f"{name}.{part}", vector) for part in parts)


def _linear(name: str, inputs: int, outputs: int, bias: bool, split: str, expert: bool = False) -> tuple[Tensor, ...]:
    weight = Tensor(f"{name}.weight", (outputs, inputs), split, expert)
    return (weight, Tensor(f"{name}.bias", (outputs,), split if split == "rows" else "", expert)) if bias else (weight,)


def _mlp(shape: ModelShape, name: str, inner: int, expert: bool = False) -> tuple[Tensor, ...]:
    gate = _linear(f"{name}.gate", shape.hidden_size, inner, shape.mlp_bias, "rows", expert) if shape.gated_mlp else ()
    return (*gate, *_linear(f"{name}.up", shape.hidden_size, inner, shape.mlp_bias, "rows", expert),
            *_linear(f"{name}.down", inner, shape.hidden_size, shape.mlp_bias, "columns", expert))


def _experts(shape: ModelShape) -> tuple[Tensor, ...]:
    """A router, the experts (each matrix of all of them as one tensor), and the expert that all tokens share."""
    router = _linear("router", shape.hidden_size, shape.num_experts, False, "")
    one = _mlp(shape, "experts", shape.moe_intermediate_size, expert=True)
    experts = tuple(replace(tensor, shape=(shape.num_experts, *tensor.shape)) for tensor in one)
    shared = _mlp(shape, "shared_expert", shape.shared_expert_size) if shape.shared_expert_size else ()
    gate = _linear("shared_expert_gate", shape.hidden_size, 1, False, "") if shape.shared_expert_gate else ()
    return (*router, *experts, *shared, *gate)


def shape_of(config: ModelConfig) -> ModelShape:
    """The shape of a model that this project trains."""
    learned = config.position == "learned"
    return ModelShape(
        architecture=config.architecture, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        num_layers=config.num_layers, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        head_size=config.head_size, intermediate_size=config.intermediate_size, max_positions=config.max_positions,
        activation=config.activation, gated_mlp=config.gated_mlp, norm=config.norm, position=config.position,
        position_rows=config.max_positions if learned else 0, rotary_size=config.rotary_size,
        parallel_residual=config.parallel_residual, qkv_bias=config.qkv_bias,
        attention_out_bias=config.attention_out_bias, mlp_bias=config.mlp_bias,
        tie_word_embeddings=config.tie_word_embeddings, embedding_dropout=config.embedding_dropout,
        attention_dropout=config.attention_dropout, residual_dropout=config.residual_dropout)


def read_shape(model: str) -> ModelShape:
    """The shape of a preset, of a transformers config.json, or of the folder that holds one.

    Architectures and keys that this project does not train are read too and get an `untrainable_reason`.

    Raises:
        ConfigError: no such file, an architecture that is not known here, sizes that give no model.
    """
    path = find_config(model)
    values, where = read_config_json(path), str(path)
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in ARCHITECTURES:
        trained = f"{where}: model_type {kind!r} is not one of {', '.join(KEYS)}"
        try:
            sizes = ARCHITECTURES[kind](values)
        except ConfigError as error:
            raise ConfigError.from_line(f"{where}: {error}") from None
        return _checked(ModelShape(architecture=kind, untrainable_reason=trained, **sizes), where)
    if not isinstance(kind, str) or kind not in KEYS:
        raise ConfigError(f"{where}: model_type", found=repr(kind),
                          expected=f"one of {', '.join(sorted((*KEYS, *ARCHITECTURES)))}")
    try:
        return shape_of(model_config_from(values, where))
    except ConfigError as error:  # a key that changes the maths, not the sizes; wrong sizes raise again here
        known = {key: values[key] for key in ("model_type", *KEYS[kind]) if key in values and "rope_" not in key}
        return replace(shape_of(model_config_from(known, where)), untrainable_reason=str(error))


def _checked(shape: ModelShape, where: str) -> ModelShape:
    for name in ("num_kv_heads", "head_size", "intermediate_size", "max_positions"):
        if getattr(shape, name) <= 0:
            raise ConfigError(f"{where}: {name}", found=getattr(shape, name), expected="more than 0")
    return shape
