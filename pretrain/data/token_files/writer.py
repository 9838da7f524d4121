"""Write token files: pairs of `.bin` and `.idx` (their format: index_file.py)."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.hashes import BlockHasher, DataHashes, hashes_path, write_hashes
from pretrain.data.token_files.index_file import (
    CHUNK_ENTRIES,
    CODES,
    HEADER,
    LENGTH_DTYPE,
    MAGIC,
    OFFSET_DTYPE,
    ranges,
)
from pretrain.data.token_files.indexed_dataset import meta_path
from pretrain.errors import ConfigError
from pretrain.paths import fsync, write_synced

_TEMPORARY = ("bin", "idx", "lengths", "documents")
_Writer = TypeVar("_Writer", bound="IndexedWriter")


class IndexedWriter:
    """Context manager that writes a `.bin/.idx` pair under temporary names, with little memory for any size.

    `finalize` renames the files. Without it, the temporary files are removed and existing files remain. Temporary files
    of a writer that was killed are removed by the next writer of the same pair.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        assert self.dtype in CODES, f"{self.dtype} has no code in the .idx format"
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self._hasher = BlockHasher()
        self._divided_tokens = self._last_end = 0  # of `add_sequences`
        self._temporary = {name: Path(f"{prefix}.{name}.tmp-{os.getpid()}") for name in _TEMPORARY}
        folder = self.prefix.absolute().parent
        self._created = [path for path in (folder, *folder.parents) if not path.exists()]
        self._files: dict[str, BinaryIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.prefix)
            for name in ("bin", "lengths", "documents"):
                self._files[name] = self._temporary[name].open("wb")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._files["bin"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._remove_temporary()
            raise ConfigError(str(self.prefix), problem=f"{error.filename} cannot be written: {error.strerror}",
                              remedy="give a prefix in a writable folder") from None
        except BaseException:  # a signal
            self._remove_temporary()
            raise

    def add_documents(self, tokens: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """Append tokens [n] of complete documents, each one sequence, which end before the positions `ends`.

        Raises ConfigError for tokens that the dtype cannot hold.
        """
        self.add_tokens(tokens)
        lengths = np.diff(np.asarray(ends, np.int64), prepend=0)
        self.add_sequences(lengths)
        self.end_documents(np.arange(self.num_sequences - lengths.size, self.num_sequences) + 1)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one complete document, int [n]."""
        self.add_documents(tokens, [np.asarray(tokens).size])

    def add_tokens(self, tokens: npt.ArrayLike) -> None:
        """Append tokens [n], which `add_sequences` and `end_documents` divide.

        Raises ConfigError for tokens that the dtype cannot hold.
        """
        values = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if values.size and not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
            raise ConfigError(str(self.prefix), found=f"tokens {values.min()} to {values.max()}",
                              expected=f"{limits.min} to {limits.max}, the range of {self.dtype.name}")
        content = values.astype(self.dtype.newbyteorder("<"), copy=False).tobytes()
        self._files["bin"].write(content)
        self._hasher.update(content)
        self.num_tokens += values.size

    def add_sequences(self, lengths: npt.ArrayLike) -> None:
        """Divide the tokens that follow the last sequence into sequences of these lengths [n]."""
        sizes = np.asarray(lengths, np.int64)
        longest = int(sizes.max()) if sizes.size else 0
        if longest > np.iinfo(np.int32).max:
            raise ConfigError(str(self.prefix), found=f"a document of {longest} tokens",
                              expected="at most 2147483647 tokens", remedy="split the document into several")
        self._files["lengths"].write(sizes.astype(LENGTH_DTYPE).tobytes())
        self._divided_tokens += int(sizes.sum())
        self.num_sequences += sizes.size

    def end_documents(self, ends: npt.ArrayLike) -> None:
        """End documents: each has the sequences up to the number in `ends` [n], counted from the first of the pair."""
        numbers = np.asarray(ends, np.int64)
        self._files["documents"].write(numbers.astype(OFFSET_DTYPE).tobytes())
        self._last_end = int(numbers[-1]) if numbers.size else self._last_end
        self.num_documents += numbers.size

    def finalize(self, meta: Mapping[str, Any] | None = None) -> None:
        """Complete the pair, PREFIX.meta.json and PREFIX.sha256.json, and rename them to their final names."""
        assert (self._divided_tokens, self._last_end) == (self.num_tokens, self.num_sequences), "inside a document"
        for file in self._files.values():
            file.flush()
        os.fsync(self._files["bin"].fileno())
        idx_sha256 = write_index(self._temporary["idx"], self.dtype, self._temporary["lengths"],
                                 self._temporary["documents"])
        commit_pair(self.prefix, tokens=self._temporary["bin"], index=self._temporary["idx"], idx_sha256=idx_sha256,
                    blocks=self._hasher.finish(), meta=meta)

    def __enter__(self: _Writer) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk, which an earlier write has already reported
                file.close()
        for path in self._temporary.values():
            with contextlib.suppress(OSError):
                path.unlink()
        for folder in self._created:  # rmdir removes only empty folders
            with contextlib.suppress(OSError):
                folder.rmdir()


def commit_pair(prefix: str | Path, *, tokens: Path, index: Path, idx_sha256: str, blocks: tuple[str, ...],
                meta: Mapping[str, Any] | None) -> None:
    """Rename complete files, which are on the disk, to PREFIX.bin and PREFIX.idx. Write the two .json files.

    The .idx is renamed last: without it, no reader accepts the other files. `blocks`: the hashes of the blocks of the
    .bin. Raises OSError.
    """
    final = {ending: Path(f"{prefix}.{ending}") for ending in ("bin", "idx")}
    temporary_meta = Path(f"{prefix}.meta.tmp-{os.getpid()}")
    try:
        if meta is not None:
            write_synced(temporary_meta, json.dumps(meta, indent=1).encode() + b"\n")
        final["idx"].unlink(missing_ok=True)
        meta_path(prefix).unlink(missing_ok=True)
        Path(f"{prefix}.summary.json").unlink(missing_ok=True)  # of the preparation of the old files
        os.replace(tokens, final["bin"])
        status, idx_status = final["bin"].stat(), index.stat()
        write_hashes(hashes_path(prefix), DataHashes(status.st_size, status.st_mtime_ns, idx_sha256, blocks,
                                                     idx_status.st_size, idx_status.st_mtime_ns))
        if meta is not None:
            os.replace(temporary_meta, meta_path(prefix))
        os.replace(index, final["idx"])
    finally:
        temporary_meta.unlink(missing_ok=True)
    fsync(final["idx"].parent)


def _remove_abandoned(prefix: Path) -> None:
    """Remove the temporary files of writers that were killed. A living writer has locked its .bin."""
    for path in list(prefix.absolute().parent.iterdir()):
        name, separator, process = path.name.rpartition(".bin.tmp-")
        if not separator or name != prefix.name or not process.isdigit():
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for ending in (*_TEMPORARY, "meta"):
                Path(f"{prefix}.{ending}.tmp-{process}").unlink(missing_ok=True)




def write_index(path: Path, dtype: npt.DTypeLike, lengths: Path, document_ends: Path | None = None) -> str:
    """Write a .idx file to the disk, and return its SHA-256. Raises OSError.

    lengths: a file with the number of tokens of each sequence, little-endian int32.
    document_ends: a file with the number of sequences up to the end of each document, little-endian int64; None: each
        sequence is a document.
    """
    num_sequences = lengths.stat().st_size // LENGTH_DTYPE.itemsize
    num_documents = num_sequences if document_ends is None else document_ends.stat().st_size // OFFSET_DTYPE.itemsize
    digest = hashlib.sha256()
    with path.open("wb") as file:
        def write(content: bytes) -> None:
            file.write(content)
            digest.update(content)

        write(HEADER.pack(MAGIC, 1, CODES[np.dtype(dtype)], num_sequences, num_documents + 1))
        for values in _read(lengths, LENGTH_DTYPE):
            write(values.tobytes())
        for values in _pointers(lengths, np.dtype(dtype).itemsize):
            write(values.astype(OFFSET_DTYPE).tobytes())
        write(bytes(OFFSET_DTYPE.itemsize))  # the first document begins with sequence 0
        if document_ends is None:
            for first, last in ranges(1, num_documents + 1, CHUNK_ENTRIES):
                write(np.arange(first, last, dtype=OFFSET_DTYPE).tobytes())
        else:
            for values in _read(document_ends, OFFSET_DTYPE):
                write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _read(path: Path, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    with path.open("rb") as file:
        while content := file.read(CHUNK_ENTRIES * dtype.itemsize):
            yield np.frombuffer(content, dtype)


def _pointers(lengths: Path, itemsize: int) -> Iterator[npt.NDArray[np.int64]]:
    end = 0
    for values in _read(lengths, LENGTH_DTYPE):
        sizes = values.astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        yield ends - sizes
        end = int(ends[-1])
