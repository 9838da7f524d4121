"""ModelShape: the sizes of a model, and the shape of every parameter, layer by layer.

Memory and FLOPs depend on nothing else in a model. Imports neither torch nor transformers.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from pretrain.errors import ConfigError
from pretrain.memory.estimate.other_architectures import ARCHITECTURES
from pretrain.model.config import ModelConfig, find_config, model_config_from
from pretrain.model.config_keys import read_config_json
from pretrain.model.families.table import FAMILIES


@dataclass(frozen=True)
class Tensor:
    """Name and shape of one parameter."""

    name: str
    shape: tuple[int, ...]
    split: str = ""  # how tensor parallelism divides it: "rows", "columns", or "" (not divided)
    expert: bool = False  # whether expert parallelism divides it

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Return whether it has two or more dimensions; if so, weight decay applies (engine/parameter_groups.py)."""
        return len(self.shape) >= 2


@dataclass(frozen=True, eq=False)  # equal blocks of a shape are one object, so that comparing them is fast
class Layer:
    """One layer of model/layer_specs.py's list."""

    kind: str  # embedding, positions, block, norm, head
    tensors: tuple[Tensor, ...]
    tied: bool = False  # whether embedding and head share the matrix
    window: int = 0  # of a block: number of latest tokens that a query sees; 0: all

    @cached_property
    def size(self) -> int:
        """Elements of all parameters."""
        return sum(tensor.size for tensor in self.tensors)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer. Sizes are numbers of elements, dropouts are probabilities.

    Fields with the same names as in ModelConfig have the same meaning.
    """

    architecture: str  # transformers' model_type
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int  # of a dense MLP
    max_positions: int
    gated_mlp: bool = True
    norm: str = "rmsnorm"  # layernorm (weight and bias), rmsnorm (weight), none (no parameters)
    norm_bias: bool = True  # of a layernorm
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    shared_norm: bool = False
    qk_norm: str = ""  # none, head, all
    embedding_norm: bool = False
    position: str = "rope"  # learned, rope, alibi
    position_rows: int = 0  # of the learned position table
    rotary_size: int = 0
    parallel_residual: bool = False
    windows: tuple[int, ...] = ()
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
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
    shared_expert_size: int = 0  # intermediate size of the expert that every token passes
    shared_expert_gate: bool = False
    norm_topk_prob: bool = False  # of the routers
    dense_layers: frozenset[int] = frozenset()  # in a model with experts: indices of the blocks without experts
    untrainable_reason: str = ""  # why this project cannot train the model; "": it can

    def layers(self) -> tuple[Layer, ...]:
        """List the layers in the order of model/layer_specs.py; parameters in the order of registration."""
        return _layers(self)

    def num_parameters(self) -> int:
        """Elements of all parameters. A tied matrix counts once."""
        layers = self.layers()
        return sum(layer.size for layer in layers) - (layers[-1].size if self.tie_word_embeddings else 0)

    def active_parameters(self) -> int:
        """Elements of the parameters that one token passes: all except the experts that the router does not choose."""
        idle_experts = self.num_experts - self.experts_per_token
        matrices = 3 if self.gated_mlp else 2
        idle_per_block = idle_experts * matrices * self.hidden_size * self.moe_intermediate_size
        return self.num_parameters() - idle_per_block * self.num_moe_layers()

    def num_moe_layers(self) -> int:
        """Number of blocks with experts."""
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    def has_experts(self, index: int) -> bool:
        """Return whether block `index` has experts."""
        return self.num_experts > 0 and index not in self.dense_layers


@lru_cache(maxsize=256)
def _layers(shape: ModelShape) -> tuple[Layer, ...]:
    embedding = Tensor("embedding", (shape.vocab_size, shape.hidden_size), "rows")
    layers = [Layer("embedding", (embedding,), tied=shape.tie_word_embeddings)]
    if shape.embedding_norm:
        layers.append(Layer("norm", _norm(shape, "norm")))
    if shape.position == "learned":
        layers.append(Layer("positions", (Tensor("embedding", (shape.position_rows, shape.hidden_size)),)))
    layers += [_block(shape, shape.has_experts(index), shape.windows[index] if shape.windows else 0)
               for index in range(shape.num_layers)]
    layers.append(Layer("norm", _norm(shape, "norm")))
    if shape.tie_word_embeddings:
        return (*layers, Layer("head", (embedding,), tied=True))
    head = _linear("lm_head", shape.hidden_size, shape.vocab_size, shape.head_bias, "rows")
    return (*layers, Layer("head", head))


@lru_cache(maxsize=512)
def _block(shape: ModelShape, experts: bool, window: int) -> Layer:
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_size
    rows = heads + 2 * shape.num_kv_heads * shape.head_size
    tensors = [*(_norm(shape, "norm1") if shape.pre_norm else ()),
               *_linear("attention.qkv", hidden, rows, shape.qkv_bias, "rows")]
    if shape.qk_norm:
        for name, count in (("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads)):
            tensors += _norm(shape, f"attention.{name}", shape.head_size * (1 if shape.qk_norm == "head" else count))
    tensors += _linear("attention.out", heads, hidden, shape.attention_out_bias, "columns")
    tensors += _norm(shape, "post_norm1") if shape.post_norm else ()
    tensors += _norm(shape, "norm2") if shape.pre_norm and not shape.shared_norm else ()
    tensors += _experts(shape) if experts else _mlp(shape, "mlp", shape.intermediate_size)
    tensors += _norm(shape, "post_norm2") if shape.post_norm else ()
    return Layer("block", tuple(tensors), window=window)


def _norm(shape: ModelShape, name: str, size: int = 0) -> tuple[Tensor, ...]:
    """Return the parameters of a norm over `size` elements; 0: over hidden_size."""
    parts: dict[str, tuple[str, ...]] = {"layernorm": ("weight", "bias") if shape.norm_bias else ("weight",),
                                         "rmsnorm": ("weight",), "none": ()}
    return tuple(Tensor(f"{name}.{part}", (size or shape.hidden_size,)) for part in parts[shape.norm])


def _linear(name: str, inputs: int, outputs: int, bias: bool, split: str, expert: bool = False) -> tuple[Tensor, ...]:
    weight = Tensor(f"{name}.weight", (outputs, inputs), split, expert)
    return (weight, Tensor(f"{name}.bias", (outputs,), split if split == "rows" else "", expert)) if bias else (weight,)


def _mlp(shape: ModelShape, name: str, inner: int, expert: bool = False) -> tuple[Tensor, ...]:
    gate = _linear(f"{name}.gate", shape.hidden_size, inner, shape.mlp_bias, "rows", expert) if shape.gated_mlp else ()
    return (*gate, *_linear(f"{name}.up", shape.hidden_size, inner, shape.mlp_bias, "rows", expert),
            *_linear(f"{name}.down", inner, shape.hidden_size, shape.mlp_bias, "columns", expert))


def _experts(shape: ModelShape) -> tuple[Tensor, ...]:
    """Return the parameters of a router, of the experts, and of the shared expert.

    Each matrix is one tensor for all experts, [num_experts, rows, columns].
    """
    router = _linear("mlp.router", shape.hidden_size, shape.num_experts, False, "")
    one = _mlp(shape, "mlp.experts", shape.moe_intermediate_size, expert=True)
    experts = tuple(replace(tensor, name=tensor.name.removesuffix(".weight"), shape=(shape.num_experts, *tensor.shape))
                    for tensor in one)
    shared = _mlp(shape, "mlp.shared_expert", shape.shared_expert_size) if shape.shared_expert_size else ()
    gate = _linear("mlp.shared_expert_gate", shape.hidden_size, 1, False, "") if shape.shared_expert_gate else ()
    return (*router, *experts, *shared, *gate)


def shape_of(config: ModelConfig) -> ModelShape:
    """Return the shape of a model that this project trains."""
    common = {field.name for field in fields(ModelShape)} & {field.name for field in fields(ModelConfig)}
    return ModelShape(position_rows=config.max_positions if config.position == "learned" else 0,
                      **{name: getattr(config, name) for name in common})


def read_shape(model: str) -> ModelShape:
    """Read the shape of a preset, of a transformers config.json, or of a folder with a config.json.

    Models that this project cannot train are read as well; their shape has an `untrainable_reason`.

    Raises:
        ConfigError: the file does not exist, the architecture is unknown, or the sizes are impossible.
    """
    path = find_config(model)
    values, where = read_config_json(path), str(path)
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        reason = f"{where}: model_type {model_type!r} can be estimated, but not trained"
        try:
            sizes = ARCHITECTURES[model_type](values)
        except ConfigError as error:
            raise ConfigError.from_line(f"{where}: {error}") from None
        return _checked(ModelShape(architecture=model_type, untrainable_reason=reason, **sizes), where)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"{where}: model_type", found=repr(model_type),
                          expected=f"one of {', '.join(sorted((*FAMILIES, *ARCHITECTURES)))}")
    try:
        return shape_of(model_config_from(values, where))
    except ConfigError as error:  # an unsupported key; if the sizes themselves are wrong, the next call raises again
        keys = ("model_type", *FAMILIES[model_type].keys)
        known = {key: values[key] for key in keys if key in values and not _is_without_memory(key)}
        return replace(shape_of(model_config_from(known, where)), untrainable_reason=str(error))


def _is_without_memory(key: str) -> bool:
    """Return whether a key of a config.json selects a function that takes the same memory as others."""
    return "rope_" in key or key in ("hidden_act", "hidden_activation", "activation_function")


def _checked(shape: ModelShape, where: str) -> ModelShape:
    """Return the shape itself. Raises ConfigError for sizes of 0 or less."""
    for name in ("num_kv_heads", "head_size", "intermediate_size", "max_positions"):
        if getattr(shape, name) <= 0:
            raise ConfigError(f"{where}: {name}", found=getattr(shape, name), expected="a number above 0")
    return shape
