"""Read the files of torch.distributed.checkpoint (DCP): `.metadata`, and the chunks of tensors in `__R_N.distcp`.

`.metadata` is a pickle of dataclasses. It is read by an unpickler that replaces each of them by a record without
methods, so that nothing of it runs, and so that it does not depend on the version of torch. A file `__R_N.distcp` is a
sequence of files that torch.save wrote: one for each chunk of a tensor, and one for each other value.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.6 to 2.13; Megatron Core 0.16 adds the
plans of all ranks to the same pickle (dist_checkpointing/strategies/state_dict_saver.py).
"""

import io
import mmap
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import Shape

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_MOST_CELLS = 2**22  # most cells of the grid that the boundaries of a tensor's chunks form
_ZIP = b"PK\x03\x04"  # first bytes of a file that torch.save wrote
_COPY_ALL = "copy all files of the checkpoint again, or use an earlier checkpoint"


class _Record:
    """The values of an object in a pickle. It has no other methods, and its constructor ignores its arguments."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.values = state


# (module, name) in the pickle -> what is created. Enumerations, paths and layouts are not used.
_CLASSES: dict[tuple[str, str], type] = {
    (module, name): type(name, (_Record,), {}) for module, names in {
        f"{_DCP}.metadata": ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                             "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        f"{_DCP}.filesystem": ("_StorageInfo",),
        f"{_DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath", "WindowsPath", "Path"),
        "pathlib._local": ("PosixPath", "WindowsPath", "Path"),  # Python 3.13
        "builtins": ("getattr",),  # members of enumerations, as Python 3.11.0 to 3.11.3 pickle them
    }.items() for name in names}
_CLASSES |= {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}


class _RejectedClassError(Exception):
    """A class or function that a pickle names, and that no description of a checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    """Creates records, containers and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _CLASSES:
            raise _RejectedClassError(f"{module}.{name}")
        return _CLASSES[module, name]


@dataclass(frozen=True)
class _Location:
    """The position of a file that torch.save wrote inside a file of the checkpoint."""

    file: str
    start: int  # bytes
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, divided among ranks in any number of dimensions."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[tuple[Shape, Shape, _Location], ...]  # offsets, sizes, place


@dataclass(frozen=True)
class DcpFiles:
    """The content of a checkpoint folder. Files are memory-mapped, and one chunk at a time is loaded from them."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, _Location]  # values that are no tensors

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All files of the checkpoint that hold something."""
        names = {place.file for _, place, _ in _all_places(self)}
        return (self.folder / METADATA, *(self.folder / name for name in sorted(names)))

    @cached_property
    def _mapped(self) -> dict[str, mmap.mmap]:
        return {}

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return a complete tensor in its stored dtype, or one index of its first dimension.

        Raises ConfigError for damaged chunks.
        """
        stored = self.tensors[name]
        out = torch.empty(stored.shape if index is None else stored.shape[1:], dtype=stored.dtype)
        for offsets, sizes, place in stored.chunks:
            if prod(sizes) == 0 or (index is not None and not 0 <= index - offsets[0] < sizes[0]):
                continue
            chunk = self._load(name, place)
            found = (chunk.dtype, tuple(chunk.shape)) if isinstance(chunk, torch.Tensor) else type(chunk).__name__
            if found != (stored.dtype, sizes):
                raise ConfigError(f"{self.folder / place.file}: {shorten(name)}", found=found,
                                  expected=f"{(stored.dtype, sizes)}, as in {METADATA}", remedy=_COPY_ALL)
            ranges = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            if index is None:
                out[ranges] = chunk
            else:
                out[ranges[1:]] = chunk[index - offsets[0]]
        return out

    def value(self, name: str) -> Any:
        """Return a value that is no tensor, such as a number. Raises ConfigError if it needs any class."""
        return self._load(name, self.objects[name])

    def _load(self, name: str, place: _Location) -> Any:
        where = f"{self.folder / place.file}: {shorten(name)}"
        if place.file not in self._mapped:
            with open(self.folder / place.file, "rb") as file:
                self._mapped[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = self._mapped[place.file][place.start:place.start + place.length]
        if not content.startswith(_ZIP):
            raise ConfigError(where, problem="it is not in the format of torch.save; chunks in the safetensors format, "
                              "or compressed ones, are not read",
                              remedy="save the checkpoint with torch's FileSystemWriter and its default format")
        return load_pickle(Path(where), content=io.BytesIO(content))


def read_dcp(folder: Path) -> DcpFiles:
    """Read `.metadata`, and check that all chunks are there and cover each tensor exactly once. Raises ConfigError."""
    path = folder / METADATA
    metadata = _unpickle(path)
    try:
        entries, storage = _values(metadata, "Metadata")["state_dict_metadata"], _locations(metadata)
        tensors, objects = {}, {}
        for name, entry in entries.items():
            if type(entry).__name__ == "BytesStorageMetadata":
                objects[str(name)] = storage[name, None]
            else:
                tensors[str(name)] = _stored(name, _values(entry, "TensorStorageMetadata"), storage)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(str(path), problem=f"it is not a description of a checkpoint as torch writes it "
                          f"({type(error).__name__}: {shorten(str(error))})", remedy=_COPY_ALL) from None
    found = DcpFiles(folder, tensors, objects)
    _check_files(found)
    for name, tensor in tensors.items():
        _check_cover(f"{path}: {shorten(name)}", tensor)
    return found


def _unpickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except OSError as error:
        raise ConfigError(str(path), problem=f"it cannot be read: {error.strerror or error}") from None
    except _RejectedClassError as error:
        raise ConfigError(str(path), problem=f"the pickle needs {shorten(str(error))}, which no checkpoint of torch "
                          "needs", remedy="nothing in the file was run; a program that loads it without such a check "
                          "may run any code") from None
    except Exception as error:  # damaged bytes make the unpickler raise many types of exceptions
        raise ConfigError(str(path), problem=f"it is damaged ({type(error).__name__}: {shorten(str(error))})",
                          remedy=_COPY_ALL) from None


def _values(record: Any, kind: str) -> Any:
    """Return the values of a record. Raises TypeError if it is of another kind."""
    if type(record).__name__ != kind or not isinstance(record, _Record):
        raise TypeError(f"{type(record).__name__} instead of {kind}")
    return record.values


def _numbers(given: Any) -> Shape:
    """Return sizes or offsets as a tuple of whole numbers."""
    numbers = tuple(given)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"sizes or offsets {shorten(str(numbers))}")
    return numbers


def _locations(metadata: Any) -> dict[tuple[str, Shape | None], _Location]:
    """Return (name, offsets of the chunk) -> place. Raises ConfigError for compressed chunks."""
    found = {}
    for index, info in _values(metadata, "Metadata")["storage_data"].items():
        key, values = _values(index, "MetadataIndex"), _values(info, "_StorageInfo")
        file, transforms = values["relative_path"], values.get("transform_descriptors")
        if transforms:
            raise ConfigError(f"{METADATA}: {shorten(str(key['fqn']))}", problem="its chunks are transformed by "
                              f"{shorten(str(transforms))}, which this program does not read",
                              remedy="save the checkpoint without extensions of the FileSystemWriter")
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"the file {shorten(str(file))}")
        offsets = None if key.get("offset") is None else _numbers(key["offset"])
        found[str(key["fqn"]), offsets] = _Location(file, *_numbers((values["offset"], values["length"])))
    return found


def _stored(name: str, values: Mapping[str, Any],
            storage: Mapping[tuple[str, Shape | None], _Location]) -> StoredTensor:
    dtype = _values(values["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype {shorten(str(dtype))} of {name}")
    shape, chunks = _numbers(values["size"]), []
    for chunk in values["chunks"]:
        fields = _values(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(fields["offsets"]), _numbers(fields["sizes"])
        ends = [start + size for start, size in zip(offsets, sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk of {name} that ends at {ends}, in a tensor of {list(shape)}")
        chunks.append((offsets, sizes, storage[name, offsets]))
    return StoredTensor(shape, dtype, tuple(chunks))


def _check_files(found: DcpFiles) -> None:
    """Raise ConfigError for a file that is missing, or shorter than what it should hold."""
    ends: dict[str, int] = {}
    for name, place, least in _all_places(found):
        ends[place.file] = max(ends.get(place.file, 0), place.start + place.length)
        if place.length < least:
            raise ConfigError(f"{found.folder / METADATA}: {shorten(name)}", found=f"{place.length} bytes for a chunk",
                              expected=f"at least {least}", remedy=_COPY_ALL)
    for file, end in ends.items():
        path = found.folder / file
        if not path.is_file():
            raise ConfigError(str(path), problem="this file of the checkpoint is missing", remedy=_COPY_ALL)
        if (size := path.stat().st_size) < end:
            raise ConfigError(str(path), found=f"{size} bytes", expected=f"at least {end}, as {METADATA} says",
                              remedy=_COPY_ALL)


def _all_places(found: DcpFiles) -> Iterator[tuple[str, _Location, int]]:
    """Yield name, place, and the smallest number of bytes that can hold it."""
    for name, tensor in found.tensors.items():
        for _, sizes, place in tensor.chunks:
            yield name, place, prod(sizes) * tensor.dtype.itemsize
    for name, place in found.objects.items():
        yield name, place, len(_ZIP)


def _check_cover(where: str, tensor: StoredTensor) -> None:
    """Raise ConfigError unless the chunks cover each element exactly once."""
    chunks = [(offsets, sizes) for offsets, sizes, _ in tensor.chunks if prod(sizes)]
    if len(chunks) == 1 and chunks[0][1] == tensor.shape:
        return
    edges = [sorted({0, size, *(edge for offsets, sizes in chunks
                                for edge in (offsets[dim], offsets[dim] + sizes[dim]))})
             for dim, size in enumerate(tensor.shape)]
    if prod(map(len, edges)) > _MOST_CELLS:
        raise ConfigError(where, problem=f"its {len(chunks)} chunks form no grid", remedy="save it with fewer ranks")
    cells = np.zeros([len(each) - 1 for each in edges], dtype=np.int32)  # how many chunks cover each cell of the grid
    places = [{edge: number for number, edge in enumerate(each)} for each in edges]
    for offsets, sizes in chunks:
        cells[tuple(slice(place[start], place[start + size])
                    for place, start, size in zip(places, offsets, sizes, strict=True))] += 1
    if (cells != 1).any():
        problem = "its chunks leave a gap" if (cells == 0).any() else "its chunks overlap"
        raise ConfigError(where, problem=f"{problem} in a tensor of {list(tensor.shape)}", remedy=_COPY_ALL)
