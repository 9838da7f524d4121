"""Write a checkpoint's weights under the names of transformers. At most one tensor and a chunk are in memory."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from pretrain.checkpoint.convert.write_weights import (
    CHUNK_NUMEL,
    PlannedTensor,
    copy_rows,
    file_names,
    index_json,
    shards_of,
    write_shards,
)
from pretrain.checkpoint.format.files import FileRecord
from pretrain.checkpoint.load.hf_folder import INDEX
from pretrain.checkpoint.load.reader import FP32, CheckpointReader, chunks_of
from pretrain.checkpoint.save.finite import all_finite
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.hf_names import TensorRule, name_in_files, tensor_rules
from pretrain.model.hf_weights import is_concatenation, our_rows_in_their_order
from pretrain.model.parameters import DTYPES


def write_hf_weights(reader: CheckpointReader, config: ModelConfig, folder: Path, *, dtype: str,
                     shard_bytes: int) -> dict[str, FileRecord]:
    """Write safetensors files, with an index if there are several. Return sizes and hashes of the safetensors files.

    A tied head is written once, as the embedding. Raises ConfigError if the checkpoint does not fit the model or a
    value is not finite in this dtype, and OSError.
    """
    rules = tensor_rules(config)
    _check_shapes(reader, rules)
    planned = [PlannedTensor(name_in_files(name, config), dtype, shape) for rule in rules
               for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)]
    groups = shards_of(planned, shard_bytes)
    shards = dict(zip(file_names("model", len(groups)), groups, strict=True))
    converter = _Converter(reader, config, DTYPES[dtype])
    records = write_shards(folder, shards, (chunk for rule in rules for chunk in converter.chunks(rule)))
    if len(shards) > 1:
        (folder / INDEX).write_text(index_json(shards))
    return records


def _check_shapes(reader: CheckpointReader, rules: Sequence[TensorRule]) -> None:
    expected = {rule.ours: rule.shape for rule in rules}
    for name in sorted(expected.keys() | reader.shapes.keys()):
        if expected.get(name) != reader.shapes.get(name):
            raise ConfigError(f"{reader.folder}: {name}", found=f"the shape {reader.shapes.get(name)}",
                              expected=f"{expected.get(name)}, as in the model of the manifest",
                              remedy="use another checkpoint")


class _Converter:
    """Yields the values of a checkpoint in the order of transformers' tensors.

    All tensors share two buffers: a chunk, and the largest tensor that must be reordered. Buffers for each tensor would
    need several times the memory, because the C library keeps freed blocks of up to 32 MB.
    """

    def __init__(self, reader: CheckpointReader, config: ModelConfig, dtype: torch.dtype) -> None:
        self._reader, self._config = reader, config
        self._chunk = torch.empty(CHUNK_NUMEL, dtype=dtype)
        reordered = (prod(rule.shape) for rule in tensor_rules(config) if not is_concatenation(rule))
        self._tensor = torch.empty(max(reordered, default=0), dtype=dtype)

    def chunks(self, rule: TensorRule) -> Iterator[torch.Tensor]:
        """Yield the flat values of `rule.theirs`. The next chunk overwrites the last one."""
        if is_concatenation(rule):
            first = 0
            for shape in rule.their_shapes():
                for start, length in chunks_of(prod(shape), CHUNK_NUMEL):
                    yield self._read(rule.ours, first + start, self._chunk.narrow(0, 0, length))
                first += prod(shape)
            return
        flat = self._tensor.narrow(0, 0, prod(rule.shape))
        for start, length in chunks_of(flat.numel(), CHUNK_NUMEL):
            self._read(rule.ours, start, flat.narrow(0, start, length))
        yield from self._reordered(rule, flat.view(rule.shape[0], -1))

    def _reordered(self, rule: TensorRule, ours: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of `rule.theirs` in chunks. No chunk has values of two tensors."""
        order = our_rows_in_their_order(rule, self._config)
        if rule.transposed:
            yield from copy_rows(ours.t(), self._chunk, order, dim=1)
        else:
            assert order is not None, rule.ours  # otherwise the tensor is a concatenation
            for rows in order.split(rule.their_rows or rule.shape[0]):
                yield from copy_rows(ours, self._chunk, rows)

    def _read(self, name: str, start: int, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with values of a parameter. Raises ConfigError if one is not finite in the dtype of `out`."""
        self._reader.copy(name, FP32, start, out)
        if not all_finite(out):
            if all_finite(self._reader.read(name, FP32, start, out.numel())):
                raise ConfigError("--dtype", problem=f"{name} has values that are too large for {out.dtype}",
                                  remedy="choose bf16 or fp32")
            raise ConfigError(f"{self._reader.folder}: {name}", problem="it has values that are NaN or infinite",
                              remedy="use an earlier checkpoint")
        return out
