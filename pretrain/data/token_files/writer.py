"""Write token files: pairs of `.bin` and `.idx` (their format: index_file.py)."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.hashes import BLOCK_BYTES, DataHashes, hash_block
from pretrain.data.token_files.index_file import (
    CHUNK_ENTRIES,
    CODES,
    HEADER,
    LENGTH_DTYPE,
    MAGIC,
    OFFSET_DTYPE,
    ranges,
)
from pretrain.errors import ConfigError
from pretrain.paths import fsync, write_synced

ENDINGS = ("bin", "sha256.json", "meta.json", "summary.json", "idx")
"""of the files of a data set, in the order in which they get their names: no reader accepts them without the .idx"""
SHARD_ENDINGS = ("documents", "shard.json", *ENDINGS)
"""of the files of a shard of a data set; its .documents and .shard.json are for the merge of the shards"""
_TEMPORARY = (*ENDINGS, "lengths", "documents")
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
        self._blocks: list[str] = []  # hashes of the blocks of the .bin
        self._divided_tokens = self._last_end = 0  # see `add_sequences`
        self._temporary = {name: Path(f"{prefix}.{name}.tmp-{os.getpid()}") for name in _TEMPORARY}
        folder = self.prefix.absolute().parent
        self._created = [path for path in (folder, *folder.parents) if not path.exists()]
        self._files: dict[str, BinaryIO] = {}

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
        self.num_tokens += values.size
        self._hash_blocks(self.num_tokens * self.dtype.itemsize // BLOCK_BYTES)

    def _hash_blocks(self, num_blocks: int) -> None:
        """Hash the blocks of the .bin that are new, up to this number."""
        if num_blocks > len(self._blocks):
            self._files["bin"].flush()
            descriptor = self._files["bin"].fileno()
            self._blocks += [hash_block(descriptor, number) for number in range(len(self._blocks), num_blocks)]

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
        """Complete the pair, PREFIX.meta.json and PREFIX.sha256.json, and give them their final names."""
        assert (self._divided_tokens, self._last_end) == (self.num_tokens, self.num_sequences), "inside a document"
        for file in self._files.values():
            file.flush()
        self._hash_blocks(-(-self.num_tokens * self.dtype.itemsize // BLOCK_BYTES))
        complete_files(self._temporary, self.dtype, self._temporary["lengths"], self._temporary["documents"],
                       blocks=tuple(self._blocks), meta=meta)
        rename_files(self._temporary, self.prefix)

    def __enter__(self: _Writer) -> _Writer:
        """Create the files: here, so that a signal cannot come between them and `__exit__`."""
        try:
            self.prefix.absolute().parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.prefix)
            for name in ("bin", "lengths", "documents"):
                self._files[name] = self._temporary[name].open("w+b")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._files["bin"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._remove_temporary()
            raise ConfigError(str(self.prefix), problem=f"{error.filename} cannot be written: {error.strerror}",
                              remedy="give a prefix in a writable folder") from None
        except BaseException:  # a signal
            self._remove_temporary()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        for remove in (*(file.close for file in self._files.values()),
                       *(path.unlink for path in self._temporary.values()),
                       *(folder.rmdir for folder in self._created)):  # rmdir removes only empty folders
            with contextlib.suppress(OSError):  # such as a full disk, which an earlier write has already reported
                remove()


def complete_files(files: Mapping[str, Path], dtype: npt.DTypeLike, lengths: Path, document_ends: Path | None = None, *,
                   blocks: tuple[str, ...], meta: Mapping[str, Any] | None,
                   summary: Mapping[str, Any] | None = None) -> None:
    """Write the files of a data set whose tokens are in files["bin"], and sync all to the disk. Raises OSError.

    files: the temporary name of each ending. lengths, document_ends: see `write_index`. blocks: hashes of the blocks of
    the .bin.
    """
    fsync(files["bin"])
    idx_sha256 = write_index(files["idx"], dtype, lengths, document_ends)
    status, idx_status = files["bin"].stat(), files["idx"].stat()
    hashes = DataHashes(status.st_size, status.st_mtime_ns, idx_sha256, idx_status.st_size, idx_status.st_mtime_ns,
                        blocks)
    write_synced(files["sha256.json"], hashes.to_json().encode())
    if meta is not None:
        write_synced(files["meta.json"], json.dumps(dict(meta), indent=1).encode() + b"\n")
    if summary is not None:
        text = json.dumps(dict(summary), indent=1, ensure_ascii=False)
        write_synced(files["summary.json"], text.encode("utf-8", "backslashreplace") + b"\n")


def rename_files(files: Mapping[str, Path], prefix: str | Path, endings: Sequence[str] = ENDINGS) -> None:
    """Give complete files their final names. A call that was killed may be repeated. Raises OSError."""
    if files[endings[0]].exists():  # first remove the files of the old data that describe or divide its tokens
        for ending in ("idx", "meta.json", "summary.json", "shard.json"):
            if ending in endings:
                Path(f"{prefix}.{ending}").unlink(missing_ok=True)
    for ending in endings:
        if files[ending].exists():
            os.replace(files[ending], f"{prefix}.{ending}")
    fsync(Path(f"{prefix}.idx").parent)


def existing_file(prefix: str) -> str:
    """Return the name of a file that a new data set of this name would replace; "" if there is none."""
    return next((name for name in (f"{prefix}.{ending}" for ending in ENDINGS) if os.path.lexists(name)), "")


def _remove_abandoned(prefix: Path) -> None:
    """Remove the temporary files of writers that were killed. A living writer has locked its .bin."""
    for path in list(prefix.absolute().parent.iterdir()):
        name, separator, process = path.name.rpartition(".bin.tmp-")
        if not separator or name != prefix.name or not process.isdigit():
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for ending in _TEMPORARY:
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
