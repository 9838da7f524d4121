"""Read and write token files: pairs of `.bin` and `.idx`, byte-compatible with Megatron-LM and GPT-NeoX.

`.bin` holds only the tokens. `.idx` (little-endian): `MMIDIDX\\0\\0` | u64 version 1 | u8 dtype code |
u64 number of sequences | u64 length of the document index (documents + 1) | int32 lengths | int64 byte offsets |
int64 document index (first sequence of each document, from 0, and the number of sequences at the end).
"""

import contextlib
import hashlib
import json
import os
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.files.hashes import BlockHasher, DataHashes, hashes_path, write_hashes
from pretrain.data.files.token_file import TokenFile
from pretrain.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_LARGEST_UINT16_VOCAB = 65_499  # limit in Megatron-LM and GPT-NeoX, which infer the dtype from the vocabulary
_REWRITE = "write it again with tools/prepare_data.py"


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron-LM and GPT-NeoX infer for a vocabulary: uint16 up to 65,499, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size <= _LARGEST_UINT16_VOCAB else np.int32)


def read_meta(prefix: str | Path) -> dict[str, Any] | None:
    """Read PREFIX.meta.json (vocab_size, tokenizer_sha256, ...). Return None if there is no such file.

    Raises ConfigError for a file that cannot be read or has invalid values.
    """
    path = Path(f"{prefix}.meta.json")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), problem=f"it cannot be read as JSON: {reason}", remedy=_REWRITE) from None
    if not isinstance(meta, dict):
        raise ConfigError(str(path), found=type(meta).__name__, expected="a JSON object", remedy=_REWRITE)
    for key, (is_valid, expected) in _META_CHECKS.items():
        value = meta.get(key)
        if value is not None and (isinstance(value, bool) or not is_valid(value)):
            raise ConfigError(f"{path}: {key}", found=json.dumps(value), expected=expected, remedy=_REWRITE)
    return meta


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


_META_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("vocab_size", "num_tokens", "num_documents", "max_token", "eod_token"),
                    (_is_count, "a whole number, at least 0")),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (lambda value: isinstance(value, str), "a string")),
    "entropy_nats": (lambda value: isinstance(value, (int, float)) and 0 <= value < 100, "a number of nats"),
}


class IndexedDataset:
    """A `.bin/.idx` pair as one flat stream of tokens, divided into documents. Tokens are read on demand.

    Attributes: num_tokens, num_documents, dtype of the file, document_offsets (int64 [num_documents + 1], in tokens),
    hashes (of every byte; None until they are known).
    Raises ConfigError that names the file if the pair is missing, truncated or inconsistent.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        index = _read_file(self.idx_path)
        code, num_sequences, index_length = _check_header(self.idx_path, index)
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[code])
        lengths = np.frombuffer(index, "<i4", num_sequences, _HEADER.size)
        pointers = np.frombuffer(index, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
        document_index = np.frombuffer(index, "<i8", index_length, _HEADER.size + 12 * num_sequences)
        sequence_offsets = self._check_sequences(lengths, pointers)
        self._check_documents(document_index, num_sequences)
        self.document_offsets: npt.NDArray[np.int64] = sequence_offsets[document_index]
        self.num_tokens, self.num_documents = int(sequence_offsets[-1]), index_length - 1
        self.file = self._open_bin()
        self.hashes: DataHashes | None = None

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of the flat stream as int64 [stop - start]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"{self.bin_path}: tokens [{start}, {stop}) of {self.num_tokens}")
        content = self.file.read(start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize)
        return np.frombuffer(content, self.dtype.newbyteorder("<")).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the index and of 64 samples spread over the tokens; hashing all tokens would take minutes."""
        return self._fingerprints[0]

    @property
    def idx_sha256(self) -> str:
        """SHA-256 of the .idx file."""
        return self._fingerprints[1]

    @cached_property
    def _fingerprints(self) -> tuple[str, str]:
        digest = hashlib.sha256(self.idx_path.read_bytes())
        idx_sha256 = digest.hexdigest()
        digest.update(self.sampled_bytes())
        return digest.hexdigest(), idx_sha256

    def sampled_bytes(self) -> bytes:
        """Read 64 samples of 1024 tokens each, at fixed positions that are spread over the .bin."""
        width, length = self.dtype.itemsize, min(self.num_tokens, 1024)
        starts = np.linspace(0, self.num_tokens - length, 64).astype(np.int64).tolist()
        return b"".join(self.file.read(start * width, length * width) for start in starts)

    def _check_sequences(self, lengths: npt.NDArray[Any], pointers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Check that lengths and byte offsets agree, and return the token offsets [sequences + 1]."""
        if len(lengths) and int(lengths.min()) < 0:
            raise ConfigError(str(self.idx_path), found=f"a sequence of {lengths.min()} tokens",
                              expected="at least 0 tokens", remedy=_REWRITE)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        expected = offsets[:-1] * self.dtype.itemsize
        wrong = np.flatnonzero(pointers != expected)
        if len(wrong):
            first = int(wrong[0])
            raise ConfigError(str(self.idx_path), found=f"sequence {first} at byte {pointers[first]} of the .bin",
                              expected=f"byte {expected[first]}, where sequence {first - 1} ends", remedy=_REWRITE)
        return offsets

    def _check_documents(self, document_index: npt.NDArray[Any], num_sequences: int) -> None:
        """Check that the document index ascends from 0 to the number of sequences."""
        ordered = len(document_index) > 0 and bool((np.diff(document_index) >= 0).all())
        if not ordered or document_index[0] != 0 or document_index[-1] != num_sequences:
            shown = f"from {document_index[0]} to {document_index[-1]}" if len(document_index) else "without entries"
            raise ConfigError(str(self.idx_path), found=f"a document index {shown}",
                              expected=f"values that rise from 0 to {num_sequences}", remedy=_REWRITE)

    def _open_bin(self) -> TokenFile:
        """Open the .bin, and check that it has the size that the .idx describes."""
        try:
            file = TokenFile(self.bin_path)
            found = file.status().st_size
        except OSError as error:
            raise ConfigError(str(self.bin_path), problem=_reason(error), remedy=_REWRITE) from None
        expected = self.num_tokens * self.dtype.itemsize
        if found != expected:
            size = "truncated" if found < expected else "too long"
            raise ConfigError(str(self.bin_path), found=f"{found} bytes ({size}, or of another .idx)",
                              expected=f"{expected} bytes ({self.num_tokens} tokens of {self.dtype.name})",
                              remedy=_REWRITE)
        return file


def _reason(error: OSError) -> str:
    return "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error.strerror}"


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = "give the prefix of a .bin/.idx pair, without .bin; tools/prepare_data.py writes one"
        raise ConfigError(str(path), problem=_reason(error), remedy=remedy) from None


def _check_header(path: Path, index: bytes) -> tuple[int, int, int]:
    """Return (dtype code, number of sequences, length of the document index), checked against the size of the .idx."""
    where = str(path)
    if index[: len(_MAGIC)] != _MAGIC:
        raise ConfigError(where, found=f"first bytes {index[:9]!r}", expected=f"{_MAGIC!r}", remedy=_REWRITE)
    if len(index) < _HEADER.size:
        raise ConfigError(where, found=f"{len(index)} bytes (truncated)",
                          expected=f"a header of {_HEADER.size} bytes", remedy=_REWRITE)
    _, version, code, num_sequences, index_length = _HEADER.unpack_from(index)
    if version != 1:
        raise ConfigError(where, found=f"version {version}", expected="version 1", remedy=_REWRITE)
    if code not in _DTYPES:
        why = " (float in one of Megatron-LM and GPT-NeoX, unsigned in the other)" if code in (6, 7) else ""
        raise ConfigError(where, found=f"dtype code {code}{why}",
                          expected="1 u8, 2 i8, 3 i16, 4 i32, 5 i64 or 8 u16", remedy=_REWRITE)
    size = _HEADER.size + 12 * num_sequences + 8 * index_length
    if len(index) != size:
        raise ConfigError(where, found=f"{len(index)} bytes",
                          expected=f"{size} bytes for {num_sequences} sequences and {index_length} index entries",
                          remedy=_REWRITE)
    return code, num_sequences, index_length


class IndexedWriter:
    """Context manager that writes a `.bin/.idx` pair, one sequence per document, under temporary names.

    `finalize` renames the files. Without it, the temporary files are removed and existing files remain.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        assert self.dtype in _CODES, f"{self.dtype} has no code in the .idx format"
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
        header = _HEADER.pack(_MAGIC, 1, _CODES[self.dtype], len(lengths), len(lengths) + 1)
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
