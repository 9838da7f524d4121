"""Read and produce the header of a safetensors file: names, dtypes, shapes and positions. Imports no torch.

A file is: length of the header (u64, little-endian), the header (JSON), and the bytes of the tensors without gaps.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pretrain.config.layout import DTYPE_BYTES
from pretrain.errors import ConfigError, shorten
from pretrain.stored_json import parse_json

Shape = tuple[int, ...]
# dtypes that weights may have: name in the header -> our name
WEIGHT_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
               "I8": 1, "U8": 1, "BOOL": 1}
_LARGEST_HEADER = 10**8  # bytes; the limit of the safetensors library
_REMEDY = "download or write the file again"


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor in a safetensors file."""

    file: str  # name in the folder
    name: str  # in this file
    dtype: str  # as in the header: "F32", "BF16" ...
    shape: Shape
    start: int  # first byte in the file
    end: int  # byte after the last one

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a safetensors file by name. Raises ConfigError if the file is damaged or truncated."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ConfigError(str(path), problem="this is a pointer of Git LFS, not the weights",
                                  remedy="`git lfs pull` in its repository downloads them")
            if size < 8 or length > min(_LARGEST_HEADER, size - 8):
                raise _damaged(path, f"the file has {size} bytes, which is less than its header needs")
            values = parse_json(file.read(length))
    except OSError as error:
        raise ConfigError(str(path), problem=f"it cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(path, f"the header is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise _damaged(path, "the header is not a JSON object")
    values.pop("__metadata__", None)
    found = {name: _stored_tensor(path, name, value, 8 + length) for name, value in values.items()}
    _check_positions(path, found, 8 + length, size)
    return found


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(str(path), problem=f"this safetensors file is damaged: {problem}", remedy=_REMEDY)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _stored_tensor(path: Path, name: str, value: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if not isinstance(dtype, str) or not all(map(_is_size, (*shape, start, end))):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"the header's entry of {shorten(name)} is malformed") from None
    if end - start < 0 or (dtype in _ITEM_BYTES and end - start != prod(shape) * _ITEM_BYTES[dtype]):
        raise _damaged(path, f"{shorten(name)} has the shape {list(shape)} and dtype {shorten(dtype)}, "
                       f"but {end - start} bytes")
    return StoredTensor(path.name, name, dtype, shape, data_start + start, data_start + end)


def _check_positions(path: Path, found: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """Raise ConfigError unless the tensors cover the rest of the file, without gaps and overlaps."""
    ordered = sorted(found.values(), key=lambda tensor: (tensor.start, tensor.end))
    end = ordered[-1].end if ordered else data_start
    if end != size:
        problem = "it is truncated" if size < end else "it is longer than its tensors"
        raise _damaged(path, f"{problem}: it has {size} bytes, and its header describes {end}")
    starts = [data_start, *(tensor.end for tensor in ordered)]
    for expected, tensor in zip(starts, ordered, strict=False):
        if tensor.start != expected:
            raise _damaged(path, f"{shorten(tensor.name)} begins at byte {tensor.start} instead of {expected}")


def header_bytes(tensors: Iterable[tuple[str, str, Shape]]) -> bytes:
    """Return the first bytes of a safetensors file whose tensors follow in this order.

    Args:
        tensors: name, dtype ("fp32", "bf16" or "fp16") and shape of each tensor.
    """
    names = {ours: theirs for theirs, ours in WEIGHT_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
