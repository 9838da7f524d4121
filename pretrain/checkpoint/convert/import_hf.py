"""Import the weights of a transformers folder as a checkpoint, one tensor at a time."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from pretrain.checkpoint.convert.new_folder import check_free_space, new_folder
from pretrain.checkpoint.convert.weights_checkpoint import write_weights_checkpoint
from pretrain.checkpoint.convert.write_weights import CHUNK_NUMEL, PlannedTensor, copy_rows
from pretrain.checkpoint.format.files import FileRecord
from pretrain.checkpoint.format.manifest import Manifest, step_of
from pretrain.checkpoint.load.hf_folder import HFFolder, HFWeights
from pretrain.checkpoint.load.hf_hashes import hash_files
from pretrain.checkpoint.load.hf_tokenizer import HFTokenizer
from pretrain.checkpoint.load.init_from import origin_of_folder
from pretrain.checkpoint.save.finite import all_finite
from pretrain.errors import ConfigError
from pretrain.model.hf_weights import is_concatenation, their_rows_in_our_order
from pretrain.model.parameters import DTYPES
from pretrain.monitor.environment import versions
from pretrain.terminal.progress import ProgressBar

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
    with new_folder(out) as temporary:
        checkpoint = temporary
        if step_of(out) < 0:
            checkpoint = temporary / "checkpoints" / "global_step0"
            checkpoint.mkdir(parents=True)
            if tokenizer is not None:
                (temporary / "tokenizer").mkdir()
                for path in tokenizer.files:
                    shutil.copyfile(path, temporary / "tokenizer" / path.name)
        _write_checkpoint(checkpoint, found, source, tokenizer.fingerprint if tokenizer else None)


def _write_checkpoint(folder: Path, found: HFFolder, source: dict[str, FileRecord], fingerprint: str | None) -> None:
    weights = HFWeights(found)
    planned = [PlannedTensor(name, weights.dtype(name), shape) for name, shape in weights.shapes.items()]
    record = json.dumps({"folder": str(found.folder.absolute()),
                         "files": {name: asdict(file) for name, file in source.items()}}, indent=1)
    write_weights_checkpoint(folder, planned, _chunks(weights, planned), _manifest(found, fingerprint),
                             {_SOURCE: record})


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


def _manifest(found: HFFolder, fingerprint: str | None) -> Manifest:
    """Return the manifest without files. No run wrote the checkpoint, so its data position and layout are empty."""
    return Manifest(
        step=0, consumed_samples=0, world_size=1, data_parallel_size=1, pipeline_stages=1, zero_stage=0,
        precision=found.dtype, grad_accum_dtype=None, offload_optimizer="none", offload_param="none", optimizer={},
        global_batch_size=0, seed=0, seq_length=found.config.max_positions, model=found.config.hf_config,
        data_fingerprint="", tokenizer_fingerprint=fingerprint, versions=versions(), finite=True, weights_only=True,
        origin=asdict(origin_of_folder(found, str(found.folder.absolute()))))
