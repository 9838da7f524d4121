"""Write the files of torch.distributed.checkpoint chunk by chunk, as ranks do, and with any damage."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


@dataclass
class DcpWriter:
    """A checkpoint folder: `add` writes tensors and other values, and `finish` the description."""

    folder: Path
    entries: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor, *splits: int) -> None:
        """Write a tensor, divided into this number of parts in each of its first dimensions; the rest as a whole."""
        parts = [((), tensor)]
        for dim, count in enumerate(splits):
            parts = [((*offsets, sum(len_of(each, dim) for each in part.tensor_split(count, dim)[:number])), piece)
                     for offsets, part in parts for number, piece in enumerate(part.tensor_split(count, dim))]
        chunks = []
        for number, (offsets, part) in enumerate(parts):
            full = torch.Size((*offsets, *[0] * (tensor.dim() - len(offsets))))
            chunks.append(ChunkStorageMetadata(full, part.size()))
            self.places[MetadataIndex(name, full, number)] = self._write(part.clone(), number)
        self.entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), chunks)

    def add_value(self, name: str, value: Any) -> None:
        """Write a value that is no tensor."""
        self.entries[name] = BytesStorageMetadata()
        self.places[MetadataIndex(name)] = self._write(value, 0)

    def _write(self, value: Any, rank: int) -> _StorageInfo:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(value, content)
        path = self.folder / f"__{rank}_0.distcp"
        with open(path, "ab") as file:
            start = file.tell()
            file.write(content.getbuffer())
        return _StorageInfo(path.name, start, len(content.getbuffer()))

    def finish(self) -> Path:
        """Write .metadata, and return the folder."""
        metadata = Metadata(self.entries, planner_data={}, storage_data=self.places,
                            storage_meta=StorageMeta(checkpoint_id=self.folder))
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return self.folder


def len_of(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim]


def write_dcp(folder: Path, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any],
              splits: Sequence[int] = (2,)) -> Path:
    """Write a checkpoint of 2 ranks, which divide the first dimension of each tensor."""
    writer = DcpWriter(folder)
    for name, tensor in tensors.items():
        writer.add(name, tensor, *splits[:tensor.dim()])
    for name, value in values.items():
        writer.add_value(name, value)
    return writer.finish()


def remove_optimizer(tensors: dict[str, torch.Tensor]) -> None:
    """Remove all that a checkpoint has of its optimizer."""
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]
