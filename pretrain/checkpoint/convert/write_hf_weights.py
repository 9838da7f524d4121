"""Write a checkpoint's weights under the names of transformers. At most one tensor is in memory."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from pretrain.checkpoint.convert.write_weights import (
    DTYPES,
    PlannedTensor,
    file_names,
    index_json,
    shards_of,
    write_shards,
)
from pretrain.checkpoint.format.files import FileRecord
from pretrain.checkpoint.load.hf_folder import INDEX
from pretrain.checkpoint.load.reader import FP32, CheckpointReader, chunks_of
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.families.family import TensorRule
from pretrain.model.hf_names import name_in_files
from pretrain.model.hf_weights import is_concatenation, to_theirs


def write_hf_weights(reader: CheckpointReader, config: ModelConfig, folder: Path, *, dtype: str,
                     shard_bytes: int) -> dict[str, FileRecord]:
    """Write safetensors files, with an index if there are several. Return sizes and hashes of the safetensors files.

    A tied head is written once, as the embedding. Raises ConfigError if the checkpoint does not fit the model or a
    value is not finite in this dtype, and OSError.
    """
    rules = config.tensors()
    _check_shapes(reader, rules)
    planned = [PlannedTensor(name_in_files(name, config), dtype, shape) for rule in rules
               for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)]
    groups = shards_of(planned, shard_bytes)
    shards = dict(zip(file_names("model", len(groups)), groups, strict=True))
    chunks = (chunk for rule in rules for chunk in _chunks(reader, rule, config, dtype))
    records = write_shards(folder, shards, chunks)
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


def _chunks(reader: CheckpointReader, rule: TensorRule, config: ModelConfig, dtype: str) -> Iterator[torch.Tensor]:
    """Yield the flat values of `rule.theirs`, one tensor after the other."""
    if is_concatenation(rule):
        first = 0
        for shape in rule.their_shapes():
            for start, length in chunks_of(prod(shape)):
                yield _read(reader, rule.ours, first + start, torch.empty(length, dtype=DTYPES[dtype]))
            first += prod(shape)
        return
    ours = torch.empty(prod(rule.shape), dtype=DTYPES[dtype])
    for start, length in chunks_of(ours.numel()):
        _read(reader, rule.ours, start, ours.narrow(0, start, length))
    theirs = to_theirs(rule, ours.view(rule.shape), config)
    del ours
    for tensor in theirs:
        yield tensor.reshape(-1)


def _read(reader: CheckpointReader, name: str, start: int, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` with values of a parameter. Raises ConfigError if one is not finite in the dtype of `out`."""
    reader.copy(name, FP32, start, out)
    if not torch.isfinite(out).all():
        if torch.isfinite(reader.read(name, FP32, start, out.numel())).all():
            raise ConfigError("--dtype", problem=f"{name} has values that are too large for {out.dtype}",
                              remedy="choose bf16 or fp32")
        raise ConfigError(f"{reader.folder}: {name}", problem="it has values that are NaN or infinite",
                          remedy="use an earlier checkpoint")
    return out
