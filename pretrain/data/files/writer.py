"""Write token files: pairs of `.bin` and `.idx` (their format: index_format.py)."""

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.files.hashes import BlockHasher, DataHashes, hashes_path, write_hashes
from pretrain.data.files.index_format import CODES, HEADER, MAGIC
from pretrain.errors import ConfigError


class IndexedWriter:
    """Context manager that writes a `.bin/.idx` pair, one sequence per document, under temporary names.

    `finalize` renames the files. Without it, the temporary files are removed and existing files remain.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        assert self.dtype in CODES, f"{self.dtype} has no code in the .idx format"
        self.num_tokens = 0
        self._lengths, self._open_tokens, self._hasher = array("i"), 0, BlockHasher()
        self._temporary = {ending: Path(f"{prefix}.{ending}.tmp-{os.getpid()}") for ending in ("bin", "idx", "meta")}
        folder = self.prefix.absolute().parent
        self._created = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._bin = self._temporary["bin"].open("wb")
        except OSError as error:
            raise ConfigError(str(self.prefix), problem=f"{error.filename} cannot be written: {error.strerror}",
                              remedy="give a prefix in a writable folder") from None

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def add_documents(self, tokens: npt.ArrayLike, ends: Sequence[int]) -> None:
        """Append tokens [n]. A document ends before each position in `ends` (ascending, at most n).

        Tokens before the first end continue the document of the last call. Tokens after the last end belong to a
        document that the next call continues. Raises ConfigError for tokens that the dtype cannot hold.
        """
        values = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if values.size and not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
            raise ConfigError(str(self.prefix), found=f"tokens {values.min()} to {values.max()}",
                              expected=f"{limits.min} to {limits.max}, the range of {self.dtype.name}")
        content = values.astype(self.dtype.newbyteorder("<")).tobytes()
        self._bin.write(content)
        self._hasher.update(content)
        start = -self._open_tokens
        for end in ends:
            self._end_document(end - start)
            start = end
        self._open_tokens = values.size - start
        self.num_tokens += values.size

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one complete document, int [n]."""
        self.add_documents(tokens, [np.asarray(tokens).size])

    def _end_document(self, num_tokens: int) -> None:
        if num_tokens > np.iinfo(np.int32).max:
            raise ConfigError(str(self.prefix), found=f"a document of {num_tokens} tokens",
                              expected="at most 2147483647 tokens", remedy="split the document into several")
        self._lengths.append(num_tokens)

    def finalize(self, meta: Mapping[str, Any] | None = None) -> None:
        """Complete the pair, PREFIX.meta.json and PREFIX.sha256.json, and rename them to their final names.

        The .idx is renamed last: without it, no reader accepts the other files.
        """
        assert not self._open_tokens, "finalize() inside a document"
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        index = self._index_bytes()
        _write_synced(self._temporary["idx"], index)
        final = {ending: Path(f"{self.prefix}.{ending}") for ending in ("bin", "idx")}
        final["meta"] = Path(f"{self.prefix}.meta.json")
        final["idx"].unlink(missing_ok=True)
        final["meta"].unlink(missing_ok=True)
        os.replace(self._temporary["bin"], final["bin"])
        status = final["bin"].stat()
        write_hashes(hashes_path(self.prefix), DataHashes(status.st_size, status.st_mtime_ns,
                                                          hashlib.sha256(index).hexdigest(), self._hasher.finish()))
        if meta is not None:
            _write_synced(self._temporary["meta"], json.dumps(meta, indent=1).encode() + b"\n")
            os.replace(self._temporary["meta"], final["meta"])
        os.replace(self._temporary["idx"], final["idx"])
        folder = os.open(self.prefix.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _index_bytes(self) -> bytes:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=offsets[1:])
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(lengths) + 1)
        arrays = (lengths.astype("<i4"), (offsets * self.dtype.itemsize).astype("<i8"),
                  np.arange(len(lengths) + 1, dtype="<i8"))
        return header + b"".join(values.tobytes() for values in arrays)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bin.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)
        for folder in self._created:  # rmdir removes only empty folders
            with contextlib.suppress(OSError):
                folder.rmdir()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
