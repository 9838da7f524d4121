"""The place of each parameter in GPT-NeoX and Megatron-DeepSpeed: layer, name inside the layer, order of the rows, and
its part on each tensor-parallel rank.

Positions in the pipeline (GPT-NeoX megatron/model/gpt2_model.py, init_specs; Megatron-DeepSpeed
megatron/model/gpt_model.py, GPTModelPipe): functions without parameters are counted as layers, so that there are gaps.

| program | embedding | first block | final norm | head |
| --- | --- | --- | --- | --- |
| GPT-NeoX | 0 | 2 | 2 after the last block | the next one |
| Megatron-DeepSpeed | 1 | 2 | 1 after the last block | the next one |
| Megatron-DeepSpeed of BigScience, and older ones | 1 | 3 | 2 after the last block | none: tied |

Rows of query_key_value on one tensor-parallel rank:

- GPT-NeoX: for each head, its query, key and value; with grouped queries all queries, all keys, all values
  (megatron/model/transformer.py, ParallelSelfAttention.forward and gqa_project; tools/ckpts/convert_neox_to_hf.py).
- Megatron-DeepSpeed: for each key head, its queries, its key, its value (tools/hf2megads_weight_converter.py). Since
  commit 676a482c, all queries, all keys, all values: its ParallelAttention.forward splits them so, although that script
  was not changed. The same commit added the argument --ds-sequence-parallel-fpdt, by which the two are distinguished.

A gated MLP has both input matrices in one. GPT-NeoX has `up` first (Gated_Activation: the second half passes the
activation), Megatron-DeepSpeed `gate` (ParallelMLP, swiglu).

How ranks divide a parameter follows from its description (`Parameter.split_dim`): column-parallel matrices and the
vocabulary by rows, row-parallel ones by columns, and each rank has a copy of the rest. Each rank has a part of `gate`
and a part of `up`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pretrain.errors import ConfigError, shorten
from pretrain.model.description import ModelConfig, Parameter

NEOX, MEGATRON = "GPT-NeoX", "Megatron-DeepSpeed"
BY_HEAD, BY_PART = "by head", "by part"  # order of the rows of query_key_value

# our module in a block -> theirs, without the name of the attention
_BLOCK = {
    "norm1": ("input_layernorm",), "norm2": ("post_attention_layernorm",),
    "attention.qkv": ("{attention}.query_key_value",), "attention.out": ("{attention}.dense",),
    # GPT-NeoX renamed dense_h_to_4h and dense_4h_to_h to linear1 and linear2; its first gated MLP had w1, w2 and w3
    "mlp.gate": ("mlp.w1",), "mlp.up": ("mlp.w3", "mlp.linear1", "mlp.dense_h_to_4h"),
    "mlp.down": ("mlp.w2", "mlp.linear2", "mlp.dense_4h_to_h"),
}
_STACKED = ("mlp.linear1", "mlp.dense_h_to_4h")  # both matrices, if there is a gate
_BUFFER = re.compile(r".*rotary_emb\.inv_freq")  # older versions of GPT-NeoX save it
TIED = "tied_modules.embed."

Key = tuple[int, str]  # index of a layer, and the name of a parameter inside the layer


@dataclass(frozen=True)
class Place:
    """The parameter of theirs that holds one of ours."""

    key: Key
    half: int | None = None  # half of its rows: the first or second half holds ours


@dataclass(frozen=True)
class PeerLayout:
    """The positions of the layers in a pipeline of one of the programs."""

    program: str
    embedding: int
    first_block: int
    num_blocks: int
    final_norm: int
    head: int | None  # None: tied
    names: Mapping[int, frozenset[str]]  # names of the parameters in each layer

    def place(self, kind: str, block: int, name: str, *, gated: bool) -> Place | None:
        """Return where a parameter of ours is; None: the checkpoint does not have it.

        Args:
            kind: of the layer, as in description.py.
            block: its number among the blocks.
            name: in the layer, such as "attention.qkv.weight".
            gated: whether the MLP has a gate.
        """
        if kind == "block":
            module, _, last = name.rpartition(".")
            return self._in_block(self.first_block + block, module, last, gated=gated)
        index, found = {
            "embedding": (self.embedding, "word_embeddings.weight"),
            "positions": (self.embedding, "position_embeddings.weight"),
            "norm": (self.final_norm, f"norm.{name.rpartition('.')[2]}" if self.program == NEOX else
                     name.rpartition(".")[2]),
            "embedding norm": (self.embedding, f"word_embeddings.norm.{name.rpartition('.')[2]}"),
            "head": (self.head, "final_linear.weight" if self.program == NEOX else "lm_head.weight"),
        }[kind]
        return None if index is None else self._first(index, (found,))

    def _in_block(self, index: int, module: str, last: str, *, gated: bool) -> Place | None:
        attention = "attention" if self.program == NEOX else "self_attention"
        candidates = [f"{theirs.format(attention=attention)}.{last}" for theirs in _BLOCK.get(module, ())]
        if module == "mlp.gate":
            candidates += [f"{theirs}.{last}" for theirs in _STACKED]
        place = self._first(index, candidates)
        if place is None or not gated or not place.key[1].startswith(_STACKED):
            return place
        is_first = (module == "mlp.up") == (self.program == NEOX)
        return Place(place.key, half=0 if is_first else 1)

    def _first(self, index: int, candidates: Iterable[str]) -> Place | None:
        """Return the place of the first candidate in the layer. The weight of GPT-NeoX's RMSNorm is called scale."""
        names = self.names[index]
        for name in candidates:
            for written in (name, re.sub(r"\bweight$", "scale", name)):
                if written in names:
                    return Place((index, written))
        return None


def find_layout(names: Mapping[int, Iterable[str]], where: str) -> PeerLayout:
    """Recognize the program and the positions by the names in the layer files. Raises ConfigError."""
    known = {index: frozenset(name for name in layer if not _BUFFER.fullmatch(name)) for index, layer in names.items()}
    neox, megatron = (_with_name(known, f"{name}.query_key_value.weight") for name in ("attention", "self_attention"))
    blocks, program = (neox, NEOX) if neox else (megatron, MEGATRON)
    embedding = _with_name(known, "word_embeddings.weight")
    if not blocks or len(embedding) != 1:
        some = ", ".join(sorted({name for layer in known.values() for name in layer})[:8])
        raise ConfigError(where, found=f"parameters with names such as {shorten(some)}",
                          expected="word_embeddings.weight in one layer, and attention.query_key_value.weight "
                          "(GPT-NeoX) or self_attention.query_key_value.weight (Megatron-DeepSpeed) in each block")
    gaps = sorted({*range(blocks[0], blocks[-1] + 1)} - {*blocks})
    if gaps:
        raise ConfigError(where, problem=f"there is no file of a block in layer {gaps[0]}, between the layers "
                          f"{blocks[0]} and {blocks[-1]}", remedy="copy all files of the checkpoint")
    head = _with_name(known, "final_linear.weight" if program == NEOX else "lm_head.weight")
    others = sorted({*known} - {*blocks, *embedding, *head})
    steps = (blocks[0] - embedding[0], others[0] - blocks[-1]) if len(others) == 1 else None
    if steps not in ({(2, 2)} if program == NEOX else {(1, 1), (2, 2)}) or head not in ([], [others[0] + 1]):
        raise ConfigError(where, found=f"blocks in the layers {blocks[0]} to {blocks[-1]}, the embedding in "
                          f"{embedding[0]}, other parameters in {', '.join(map(str, [*others, *head])) or 'none'}",
                          expected=f"the layers of {program}: embedding, blocks, final norm, head",
                          remedy="copy all files of the checkpoint")
    return PeerLayout(program, embedding[0], blocks[0], len(blocks), others[0], head[0] if head else None, known)


def _with_name(known: Mapping[int, frozenset[str]], name: str) -> list[int]:
    return sorted(index for index, names in known.items() if name in names)


def key_of(name: str, layout: PeerLayout) -> Key | None:
    """Return the key of a name in `param_shapes`; None: it has another form."""
    if name.startswith(TIED):
        return layout.embedding, name.removeprefix(TIED)
    index, _, rest = name.removeprefix("sequential.").partition(".")
    return (int(index), rest) if index.isdecimal() and rest else None


def part_shape(parameter: Parameter, ranks: int, *, is_half: bool, vocab_rows: int = 0) -> tuple[int, ...] | None:
    """Return the shape of the part of one rank; None if the ranks cannot divide the parameter.

    Args:
        is_half: theirs stacks two parameters of this shape.
        vocab_rows: of the padded vocabulary, for a parameter with a row for each token; 0: another parameter.
    """
    shape, dim = list(parameter.shape), parameter.split_dim
    if vocab_rows:
        shape[0] = vocab_rows
    if dim is None:
        return tuple(shape)
    if shape[dim] % ranks:
        return None
    shape[dim] = shape[dim] // ranks * (2 if is_half else 1)
    return tuple(shape)


def merge(parts: Sequence[torch.Tensor], parameter: Parameter, *, half: int | None) -> torch.Tensor:
    """Return the complete parameter, with the rows that pad a vocabulary. All copies must have been compared."""
    if parameter.split_dim is None:
        return parts[0]
    if half is not None:
        parts = [part.chunk(2)[half] for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), parameter.split_dim)


def merge_qkv(parts: Sequence[torch.Tensor], config: ModelConfig, order: str) -> torch.Tensor:
    """Return all rows of queries, then those of keys, then those of values, each by head.

    Args:
        parts: weight or bias of query_key_value of each rank.
        order: of a part's rows. BY_HEAD: for each key head, its queries, its key, its value; otherwise all queries, all
            keys, all values.
    """
    ranks, size = len(parts), config.head_size
    queries, keys = config.num_heads // ranks, config.num_kv_heads // ranks
    separated: list[Sequence[torch.Tensor]] = []
    for part in parts:
        rest = part.shape[1:]
        if order == BY_HEAD:
            by_head = part.view(keys, queries // keys + 2, size, *rest)
            split = by_head.split([queries // keys, 1, 1], dim=1)
            separated.append([rows.reshape(-1, *rest) for rows in split])
        else:
            separated.append(part.split([queries * size, keys * size, keys * size]))
    return torch.cat([rows[index] for index in range(3) for rows in separated])
