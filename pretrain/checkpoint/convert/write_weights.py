"""Write weights as safetensors files, chunk by chunk, and as a checkpoint of weights alone.

Any layout can start from a checkpoint of weights alone, which no run wrote. `import_hf` makes one of a transformers
folder.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pretrain.checkpoint.convert.new_folder import check_free_space, new_folder
from pretrain.checkpoint.format.fragments import FileLocation, Fragment
from pretrain.checkpoint.format.hashed_files import FileRecord, HashedFile, sha256_of
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import step_of
from pretrain.checkpoint.format.shard_index import BUFFERS_FILE, index_name, index_text, tensor_entry
from pretrain.checkpoint.load.hf_folder import HFFolder, HFTokenizer, Shape, hash_files, header_bytes
from pretrain.checkpoint.load.init_from import origin_of_folder
from pretrain.checkpoint.load.reader import HFWeights, all_finite
from pretrain.config.layout import DTYPE_BYTES
from pretrain.errors import ConfigError
from pretrain.model.hf_weights import is_concatenation, their_rows_in_our_order
from pretrain.model.parameters import DTYPES
from pretrain.monitor.environment import versions
from pretrain.progress import ProgressBar

CHUNK_NUMEL = 2**22  # largest number of elements that are written at once
_SHARD_BYTES = 5 * 10**9
_SOURCE = "imported_from.json"  # folder, and size and SHA-256 of each file that was imported


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the files to write."""

    name: str
    dtype: str  # "fp32", "bf16" or "fp16"
    shape: Shape

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


def shards_of(tensors: Sequence[PlannedTensor], shard_bytes: int, stem: str) -> dict[str, list[PlannedTensor]]:
    """Divide the tensors into files of at most `shard_bytes`, in order. A larger tensor gets its own file.

    The files are named STEM.safetensors, or STEM-I-of-N.safetensors, as transformers names them.
    """
    shards: list[list[PlannedTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.num_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    count = len(shards)
    return {f"{stem}-{i:05d}-of-{count:05d}.safetensors" if count > 1 else f"{stem}.safetensors": shard
            for i, shard in enumerate(shards, start=1)}


def copy_rows(matrix: torch.Tensor, buffer: torch.Tensor, order: torch.Tensor | None = None, *,
              dim: int = 0) -> Iterator[torch.Tensor]:
    """Copy consecutive rows of a matrix into `buffer`, as many as fit, and yield it; the next ones overwrite them.

    Args:
        buffer: has the matrix's dtype if there is an `order`.
        order: indices of the rows (`dim` 0) or columns (`dim` 1) in the order of the result; None: as they are.
    """
    num_columns = matrix.shape[1]
    num_rows = len(order) if order is not None and dim == 0 else matrix.shape[0]
    at_once = buffer.numel() // num_columns
    for start in range(0, num_rows, at_once):
        count = min(at_once, num_rows - start)
        chunk = buffer.narrow(0, 0, count * num_columns)
        rows = chunk.view(count, num_columns)
        if order is None:
            rows.copy_(matrix[start:start + count])
        elif dim == 0:
            torch.index_select(matrix, 0, order[start:start + count], out=rows)
        else:
            torch.index_select(matrix[start:start + count], 1, order, out=rows)
        yield chunk


def write_shards(folder: Path, shards: dict[str, list[PlannedTensor]],
                 chunks: Iterator[torch.Tensor]) -> dict[str, FileRecord]:
    """Write the files and return their sizes and hashes. Raises OSError.

    Args:
        shards: file name -> tensors in it.
        chunks: flat tensors on the CPU that follow each other in the order of `shards`. They have the planned dtypes,
            and none has values of two planned tensors.
    """
    records = {}
    total = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    with ProgressBar("writing weights", total) as progress:
        for file, tensors in shards.items():
            with HashedFile(folder / file) as output:
                output.write(header_bytes((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors))
                for tensor in tensors:
                    _write_tensor(output, tensor, chunks, progress)
                records[file] = output.close()
    return records


def _write_tensor(output: HashedFile, tensor: PlannedTensor, chunks: Iterator[torch.Tensor],
                  progress: ProgressBar) -> None:
    left = tensor.num_bytes
    while left > 0:
        chunk = next(chunks)
        assert chunk.dtype == DTYPES[tensor.dtype], tensor.name
        left -= output.write(chunk.contiguous().view(torch.uint8).numpy().data)
        progress.advance(chunk.nbytes, tensor.name)
    assert left == 0, tensor.name


def index_json(shards: dict[str, list[PlannedTensor]]) -> str:
    """Return the text of transformers' model.safetensors.index.json."""
    tensors = [tensor for shard in shards.values() for tensor in shard]
    metadata = {"total_parameters": sum(tensor.num_elements for tensor in tensors),
                "total_size": sum(tensor.num_bytes for tensor in tensors)}
    weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"


def weights_manifest(**facts: Any) -> Manifest:
    """Return the manifest of weights that no run wrote, without files. Its data position and layout are empty."""
    return Manifest(
        step=0, consumed_samples=0, world_size=1, data_parallel_size=1, pipeline_stages=1, zero_stage=0,
        grad_accum_dtype=None, offload_optimizer="none", offload_param="none", optimizer={}, global_batch_size=0,
        seed=0, data_fingerprint="", versions=versions(), finite=True, weights_only=True, **facts)


def write_weights_run(out: Path, planned: Sequence[PlannedTensor], chunks: Iterator[torch.Tensor], manifest: Manifest,
                      *, tokenizer: Mapping[str, Path], others: Mapping[str, str] | None = None,
                      buffers: Mapping[str, torch.Tensor]) -> None:
    """Write weights as the checkpoint of step 0 of the new run folder `out`, and the tokenizer next to it.

    If the name of `out` is global_step0, write only this checkpoint.

    Args:
        planned: the tensors, under our names.
        chunks: their flat values on the CPU, one after another; see `write_shards`.
        manifest: without files.
        tokenizer: name -> path of the tokenizer's files.
        others: name -> text of further files of the checkpoint.
        buffers: values of the model's buffers, under our names.
    """
    with new_folder(out) as temporary:
        folder = temporary
        if step_of(out) < 0:
            folder = temporary / "checkpoints" / "global_step0"
            folder.mkdir(parents=True)
            if tokenizer:
                (temporary / "tokenizer").mkdir()
            for name, path in tokenizer.items():
                shutil.copyfile(path, temporary / "tokenizer" / name)
        # not "model": transformers must not load these files, whose tensors have our names
        shards = shards_of(planned, _SHARD_BYTES, "weights")
        records = write_shards(folder, shards, chunks)
        for name, text in {index_name(0): _shard_index(shards), **(others or {})}.items():
            (folder / name).write_text(text, encoding="utf-8")
            records[name] = _record(folder / name)
        if buffers:
            save_file({name: buffer.float().contiguous() for name, buffer in buffers.items()}, folder / BUFFERS_FILE)
            records[BUFFERS_FILE] = _record(folder / BUFFERS_FILE)
        (folder / MANIFEST).write_text(replace(manifest, files=records).to_json())


def _record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, sha256_of(path))


def _shard_index(shards: Mapping[str, Sequence[PlannedTensor]]) -> str:
    """Return the text of the checkpoint's shard index."""
    entries = [tensor_entry(FileLocation(file, (tensor.name,)), FileLocation(file, ()),
                            [Fragment(tensor.name, tensor.shape, 0, tensor.num_elements, 0)])
               for file, tensors in shards.items() for tensor in tensors]
    return index_text("", [{}], entries)


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
