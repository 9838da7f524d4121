"""Write weights as a checkpoint without a run: weights alone, which any layout can start from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pretrain.checkpoint.convert.write_weights import PlannedTensor, file_names, shards_of, write_shards
from pretrain.checkpoint.format.files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest

_SHARD_BYTES = 5 * 10**9
_INDEX = "shard_index_rank_00000.json"


def write_weights_checkpoint(folder: Path, planned: Sequence[PlannedTensor], chunks: Iterator[torch.Tensor],
                             manifest: Manifest, others: Mapping[str, str]) -> None:
    """Write the weights, the index and the manifest into the folder, which exists.

    Args:
        planned: the tensors, under our names.
        chunks: their flat values on the CPU, one after another; see `write_shards`.
        manifest: without files.
        others: name -> text of further files.
    """
    groups = shards_of(planned, _SHARD_BYTES)
    # not "model": transformers must not load these files, whose tensors have our names
    shards = dict(zip(file_names("weights", len(groups)), groups, strict=True))
    records = write_shards(folder, shards, chunks)
    for name, text in {_INDEX: _index_json(shards), **others}.items():
        (folder / name).write_text(text, encoding="utf-8")
        records[name] = FileRecord((folder / name).stat().st_size, sha256_of(folder / name))
    (folder / MANIFEST).write_text(replace(manifest, files=records).to_json())


def _index_json(shards: Mapping[str, Sequence[PlannedTensor]]) -> str:
    """Return the text of the checkpoint's shard index. `format/shard_index.py` describes its keys."""
    entries = [{"group": 0, "weights": [file, [tensor.name]], "states": [file, []], "elementwise": [], "scalars": {},
                "other": [], "fragments": [[tensor.name, tensor.shape, 0, tensor.num_elements, 0]]}
               for file, tensors in shards.items() for tensor in tensors]
    return json.dumps({"optimizer": "", "groups": [{}], "tensors": entries}, separators=(",", ":"))
