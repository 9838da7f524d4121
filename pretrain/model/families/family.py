"""The parts of a model family, and helpers to list its tensors.

A family is one value of `model_type` in a transformers config.json. This file imports no torch, so that the names and
shapes in a weights file can be checked before torch is imported.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig

Values = Mapping[str, Any]  # content of a config.json, with the family's defaults filled in
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """One parameter of this project's model, and the tensors of transformers that hold the same numbers.

    To convert from transformers: concatenate the rows of `theirs`, transpose if `transposed`, then reorder the rows as
    `row_order` says. `hf_weights.py` does this in both directions.
    """

    ours: str  # as named by layer_specs.py
    shape: Shape  # of our parameter
    theirs: tuple[str, ...]
    their_rows: tuple[int, ...] = ()  # rows of each of `theirs`, if there is more than one
    transposed: bool = False  # theirs is [in, out]
    # "": the same; "head_major": theirs is head, then q, k, v; ours is q, k, v, then head; "rotary_neighbours": theirs
    # rotates the elements 2 i and 2 i + 1 of a query or key head, ours i and i + rotary_size / 2
    row_order: str = ""

    @property
    def is_stacked(self) -> bool:
        """True if the parameter stacks the matrices of all experts. Each of them is one of `theirs`."""
        return len(self.shape) == 3

    def their_shapes(self) -> tuple[Shape, ...]:
        """Return the shape of each tensor in `theirs`."""
        if self.transposed:
            return ((self.shape[1], self.shape[0]),)
        if self.is_stacked:
            return (self.shape[1:],) * self.shape[0]
        if len(self.theirs) == 1:
            return (self.shape,)
        return tuple((rows, *self.shape[1:]) for rows in self.their_rows)


@dataclass(frozen=True)
class Family:
    """A value of `model_type`. Only `config.py`, `config_keys.py` and `hf_weights.py` use its fields."""

    keys: dict[str, Any]  # keys of the config.json that change the model, with transformers' defaults
    read: Callable[[Values, str], dict[str, Any]]  # (values, name of the file for errors) -> fields of ModelConfig
    tensors: Callable[["ModelConfig"], Iterator[TensorRule]]  # in the order of layer_specs.py, without a tied head
    embedding: str  # their name of the token embedding, which is also the head's matrix if both are tied
    prefix: str  # of all their names except the head's; the base model alone is saved without it
    head_in_files: str = ""  # name of the head in weights files, if it is not "lm_head"
    key_names: dict[str, str] = field(default_factory=dict)  # field of ModelConfig -> key, where the two differ
    nullable: frozenset[str] = frozenset()  # keys that may be null although their default is not null
    fixed: dict[str, Any] = field(default_factory=dict)  # keys for which only this value, or null, is implemented
    ignored: frozenset[str] = frozenset()  # keys that do not change the model


def linear(ours: str, theirs: str, rows: int, columns: int, *, bias: bool,
           transposed: bool = False) -> Iterator[TensorRule]:
    """Yield the rules of a linear layer with the weight [rows, columns]."""
    yield TensorRule(f"{ours}.weight", (rows, columns), (f"{theirs}.weight",), transposed=transposed)
    if bias:
        yield TensorRule(f"{ours}.bias", (rows,), (f"{theirs}.bias",))


def norm(ours: str, theirs: str, config: "ModelConfig", size: int = 0) -> Iterator[TensorRule]:
    """Yield the rules of a norm over `size` elements (default: hidden_size)."""
    shape = (size or config.hidden_size,)
    yield TensorRule(f"{ours}.weight", shape, (f"{theirs}.weight",))
    if config.norm == "layernorm" and config.norm_bias:
        yield TensorRule(f"{ours}.bias", shape, (f"{theirs}.bias",))


def qkv_rows(config: "ModelConfig") -> tuple[int, int, int]:
    """Return the rows of the query, key and value matrices."""
    return (config.num_heads * config.head_size, config.num_kv_heads * config.head_size,
            config.num_kv_heads * config.head_size)


def separate_qkv(ours: str, theirs: str, config: "ModelConfig", *, row_order: str = "") -> Iterator[TensorRule]:
    """Yield the rules of one matrix [q; k; v] here, and the matrices q_proj, k_proj and v_proj of `theirs`."""
    rows, names = qkv_rows(config), [f"{theirs}.{part}_proj" for part in "qkv"]
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        shape = (sum(rows), config.hidden_size) if kind == "weight" else (sum(rows),)
        yield TensorRule(f"{ours}.{kind}", shape, tuple(f"{name}.{kind}" for name in names), their_rows=rows,
                         row_order=row_order)


def fused_qkv(ours: str, theirs: str, config: "ModelConfig", *, row_order: str = "",
              transposed: bool = False) -> Iterator[TensorRule]:
    """Yield the rules of one matrix [q; k; v] here and in transformers."""
    rows = sum(qkv_rows(config))
    yield TensorRule(f"{ours}.weight", (rows, config.hidden_size), (f"{theirs}.weight",), transposed=transposed,
                     row_order=row_order)
    if config.qkv_bias:
        yield TensorRule(f"{ours}.bias", (rows,), (f"{theirs}.bias",), row_order=row_order)


def whole_model(config: "ModelConfig", *, embedding: str, blocks: str, final_norm: str,
                block: Callable[[str, str, "ModelConfig"], Iterator[TensorRule]], head: str = "lm_head",
                positions: str = "", embedding_norm: str = "") -> Iterator[TensorRule]:
    """Yield the rules of all layers, in the order of layer_specs.py.

    Args:
        embedding, positions: their names of the tables of tokens and of learned positions.
        embedding_norm: their name of the norm after the embedding, if config.embedding_norm.
        blocks: their name of the list of blocks, such as "model.layers".
        block: yields a block's rules for (our name, their name, config).
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    first = "tied_modules.embed" if config.tie_word_embeddings else "0"
    yield TensorRule(f"{first}.embedding", (vocab, hidden), (embedding,))
    start = 1
    if config.embedding_norm:
        yield from norm(f"{start}.norm", embedding_norm, config)
        start += 1
    if config.position == "learned":
        yield TensorRule(f"{start}.embedding", (config.max_positions, hidden), (positions,))
        start += 1
    for index in range(config.num_layers):
        yield from block(str(start + index), f"{blocks}.{index}", config)
    end = start + config.num_layers
    yield from norm(f"{end}.norm", final_norm, config)
    if not config.tie_word_embeddings:
        yield from linear(f"{end + 1}.lm_head", head, vocab, hidden, bias=config.head_bias)
