"""Merge the tensor-parallel parts of one parameter of GPT-NeoX or Megatron-DeepSpeed into ours.

How ranks divide a parameter follows from its description (`Parameter.split_dim`): column-parallel matrices and the
vocabulary by rows, row-parallel ones by columns, and each rank has a copy of the rest. Of a gated MLP's matrix, each
rank has a part of `gate` and a part of `up`.
"""

from collections.abc import Sequence

import torch

from pretrain.extensions.adopt.megatron.names import BY_HEAD
from pretrain.model.description import ModelConfig, Parameter


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
