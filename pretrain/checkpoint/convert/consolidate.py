"""Write the weights of a sharded checkpoint as safetensors files, one chunk of a parameter at a time."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.convert.new_folder import fill_new_folder
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.reader import FP32, CheckpointReader, chunks_of
from pretrain.terminal.progress import ProgressBar

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHARD_BYTES = 5 * 10**9  # largest size of a file, unless one parameter is larger
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def consolidate(folder: Path, out: Path, *, dtype: str) -> None:
    """Write all weights as safetensors files, and the model's config.json, into the new folder `out`.

    The weights have the names of this project's modules, not those of transformers.

    Args:
        dtype: "fp32" writes the exact master weights; "bf16" writes rounded master weights.
    """
    manifest = read_manifest(folder)

    def write(temporary: Path) -> None:
        reader = CheckpointReader(folder)
        shards = _shards(reader.shapes, DTYPES[dtype].itemsize)
        names = ["model.safetensors"] if len(shards) == 1 else [
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        total = sum(prod(shape) for shape in reader.shapes.values()) * DTYPES[dtype].itemsize
        with ProgressBar("writing weights", total) as progress:
            for file, shard in zip(names, shards, strict=True):
                _write_safetensors(reader, temporary / file, shard, DTYPES[dtype], progress)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (temporary / "config.json").write_text(json.dumps(manifest.model, indent=1))

    fill_new_folder(folder, out, f"consolidate {dtype}", write)


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[list[str]]:
    """Divide the parameters into files of at most SHARD_BYTES, in order. A larger parameter gets its own file."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        num_bytes = prod(shape) * itemsize
        if shards[-1] and used + num_bytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += num_bytes
    return shards


def _write_safetensors(reader: CheckpointReader, path: Path, names: list[str], dtype: torch.dtype,
                       progress: ProgressBar) -> None:
    """Write one safetensors file: the header's length (u64), a JSON header, and the tensors' bytes, chunk by chunk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + prod(reader.shapes[name]) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": reader.shapes[name], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for start, length in chunks_of(prod(reader.shapes[name])):
                values = reader.read(name, FP32, start, length).to(dtype)
                file.write(values.view(torch.uint8).numpy().data)
                progress.advance(length * dtype.itemsize, name)
