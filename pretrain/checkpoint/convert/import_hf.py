"""Import the weights of a transformers folder as a checkpoint, one tensor at a time."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from pretrain.checkpoint.convert.new_folder import check_free_space
from pretrain.checkpoint.convert.write_weights import (
    CHUNK_NUMEL,
    PlannedTensor,
    copy_rows,
    weights_manifest,
    write_weights_run,
)
from pretrain.checkpoint.load.hf_folder import HFFolder, HFTokenizer, hash_files
from pretrain.checkpoint.load.init_from import origin_of_folder
from pretrain.checkpoint.load.reader import HFWeights, all_finite
from pretrain.errors import ConfigError
from pretrain.model.hf_weights import is_concatenation, their_rows_in_our_order
from pretrain.model.parameters import DTYPES
from pretrain.progress import ProgressBar

_SOURCE = "imported_from.json"  # folder, and size and SHA-256 of each file that was imported


def import_hf(found: HFFolder, out: Path, tokenizer: HFTokenizer | None) -> None:
    """Write the weights as the checkpoint of step 0 of the new run folder `out`, and the tokenizer next to it.

    If the name of `out` is global_step0, write only this checkpoint.

    Raises ConfigError if a file differs from its recorded hash, cannot be read or written, or has a value that is not
    finite.
    """
    check_free_space(out, sum(map(found.bytes_of, found.files)))
    with ProgressBar("hashing", sum(map(found.bytes_of, found.files))) as progress:
        source = hash_files(found, progress.advance)
    weights = HFWeights(found)
    planned = [PlannedTensor(name, weights.dtype(name), shape) for name, shape in weights.shapes.items()]
    record = json.dumps({"folder": str(found.folder.absolute()),
                         "files": {name: asdict(file) for name, file in source.items()}}, indent=1)
    manifest = weights_manifest(
        precision=found.dtype, seq_length=found.config.max_positions, model=found.config.hf_config,
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else None,
        origin=asdict(origin_of_folder(found, str(found.folder.absolute()))))
    write_weights_run(out, planned, _chunks(weights, planned), manifest, others={_SOURCE: record},
                      buffers=weights.buffers(),
                      tokenizer={path.name: path for path in tokenizer.files} if tokenizer else {})


def _chunks(weights: HFWeights, planned: list[PlannedTensor]) -> Iterator[torch.Tensor]:
    """Yield the flat values of our tensors. The next chunk overwrites the last one.

    Where possible, only chunks are copied from the mapped files, not complete tensors as `HFWeights.stored` does.
    Raises ConfigError for values that are NaN or infinite.
    """
    buffers = {tensor.dtype: torch.empty(CHUNK_NUMEL, dtype=DTYPES[tensor.dtype]) for tensor in planned}
    for tensor in planned:
        for chunk in _chunks_of(weights, tensor.name, buffers[tensor.dtype]):
            if not all_finite(chunk):
                raise ConfigError(f"{weights.folder}: {', '.join(weights.rules[tensor.name].theirs)}",
                                  problem="it has values that are NaN or infinite",
                                  remedy="use other weights, or download the files again")
            yield chunk


def _chunks_of(weights: HFWeights, name: str, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    rule = weights.rules[name]
    if is_concatenation(rule):
        for theirs in weights.their_tensors(name):
            yield from copy_rows(theirs.view(theirs.shape[0], -1), buffer)
    elif len(rule.theirs) == 1:
        theirs = weights.their_tensors(name)[0]
        matrix = theirs.t() if rule.transposed else theirs.view(theirs.shape[0], -1)
        yield from copy_rows(matrix, buffer, their_rows_in_our_order(rule, weights.config))
    else:
        yield from copy_rows(weights.stored(name).view(rule.shape[0], -1), buffer)
