"""The .idx file of a data set: its format, a reader of single entries, and checks of the entries.

Token files are pairs of `.bin` and `.idx`, byte-compatible with Megatron-LM and GPT-NeoX. `.bin` holds only the tokens.
`.idx` (little-endian): `MMIDIDX\\0\\0` | u64 version 1 | u8 dtype code | u64 number of sequences | u64 length of the
document index (documents + 1) | int32 lengths | int64 byte offsets | int64 document index (first sequence of each
document, from 0, and the number of sequences at the end).

Entries are read on demand, so that the size of the file matters neither for time nor memory.
"""

import hashlib
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.token_file import TokenFile, Url
from pretrain.errors import ConfigError, file_errors, listed

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
LENGTH_DTYPE, OFFSET_DTYPE = np.dtype("<i4"), np.dtype("<i8")  # lengths; byte offsets and document index
REWRITE = "write it again with `ds-pretrain prepare`"
_LARGEST_UINT16_VOCAB = 65_499  # limit in Megatron-LM and GPT-NeoX, which infer the dtype from the vocabulary
SMALL_INDEX_BYTES = 64 * 2**20  # up to this size, a start reads every entry of the .idx: about 0.1 s
SAMPLED_RUNS, RUN_ENTRIES = 128, 512  # a start reads this many runs of entries of a larger .idx
CHUNK_ENTRIES = 2**18  # read or written at once
_CHUNK_BYTES = 2**20
_OPEN = "give the prefix of a .bin/.idx pair, without .bin; `ds-pretrain prepare` writes one"


class IndexFile:
    """An open .idx file with a valid header and the size that the header describes.

    `copy`: the file on this disk, if `path` is a URL. Raises ConfigError that names the file otherwise.
    """

    def __init__(self, path: Path | Url, copy: Path | None = None) -> None:
        self.path = path
        try:
            self.file = TokenFile(copy or Path(str(path)))
            self.status = self.file.status()  # status of the open file, not of its name
            self.num_bytes = self.status.st_size
            header = self.file.read(0, min(self.num_bytes, HEADER.size))
        except OSError as error:
            raise ConfigError(str(path), problem=reason(error), remedy=_advice(path)) from None
        code, self.num_sequences, self.num_index_entries = _parse_header(path, header)
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        self._check_size()

    @property
    def is_small(self) -> bool:
        """True if the file may be read completely at each start."""
        return self.num_bytes <= SMALL_INDEX_BYTES

    def lengths(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """Return the numbers of tokens of the sequences [first, last)."""
        return self._entries(LENGTH_DTYPE, HEADER.size, first, last)

    def pointers(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the byte offsets of the sequences [first, last) in the .bin."""
        return self._entries(OFFSET_DTYPE, HEADER.size + 4 * self.num_sequences, first, last)

    def document_index(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the entries [first, last) of the document index: the number of the first sequence of each document."""
        return self._entries(OFFSET_DTYPE, HEADER.size + 12 * self.num_sequences, first, last)

    @property
    def document_end(self) -> int:
        """Last entry of the document index: the number of sequences at which the last document ends."""
        return int(self.document_index(self.num_index_entries - 1, self.num_index_entries)[0])

    def _entries(self, dtype: np.dtype[Any], start: int, first: int, last: int) -> npt.NDArray[Any]:
        with file_errors(self.path, remedy="start again when it can be read"):  # a disk or a network may fail
            content = self.file.read(start + first * dtype.itemsize, (last - first) * dtype.itemsize)
        return np.frombuffer(content, dtype)

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole file. This takes about three seconds per GB, once."""
        return self._digest.hexdigest()

    def hash_with(self, suffix: bytes) -> str:
        """Return the SHA-256 of the whole file, followed by `suffix`."""
        digest = self._digest.copy()
        digest.update(suffix)
        return digest.hexdigest()

    @cached_property
    def _digest(self) -> "hashlib._Hash":
        digest = hashlib.sha256()
        for start in range(0, self.num_bytes, _CHUNK_BYTES):
            digest.update(self.file.read(start, min(_CHUNK_BYTES, self.num_bytes - start)))
        return digest

    def sampled_bytes(self) -> bytes:
        """Return the header, the size, and runs of entries that are spread over the file."""
        runs = [self.file.read(start, min(RUN_ENTRIES * 8, self.num_bytes))
                for start in spread(self.num_bytes, RUN_ENTRIES * 8)]
        return b"".join([self.num_bytes.to_bytes(8, "little"), self.file.read(0, HEADER.size), *runs])

    def _check_size(self) -> None:
        sequences, entries = self.num_sequences, self.num_index_entries
        expected = HEADER.size + 12 * sequences + 8 * entries
        if self.num_bytes == expected:
            return
        if sequences and self.num_bytes == expected + sequences:
            raise ConfigError(str(self.path), problem="it has a mode for each sequence, as the multimodal data of "
                              "Megatron-LM has", remedy="only text can be read: write it again without modes")
        raise ConfigError(str(self.path), found=f"{self.num_bytes} bytes",
                          expected=f"{expected} bytes for {sequences} sequences and {entries} index entries",
                          remedy=REWRITE)


def spread(total: int, run: int) -> list[int]:
    """Return where runs of entries start that are spread over `total` entries, in ascending order."""
    return sorted({number * max(total - run, 0) // (SAMPLED_RUNS - 1) for number in range(SAMPLED_RUNS)})


def _advice(path: Path | Url) -> str:
    """Return what to do about an .idx that cannot be opened: `path` is its prefix with .idx at the end."""
    given = Path(str(path).removesuffix(".idx"))
    if not isinstance(path, Path) or path.exists():
        return _OPEN
    if given.suffix in (".bin", ".idx") and given.exists():
        return f"give the prefix without {given.suffix}: {given.with_suffix('')}"
    if given.is_dir() and (pairs := sorted(given.glob("*.idx"))):
        return f"the folder {given} has these prefixes: {listed([pair.with_suffix('') for pair in pairs])}"
    if given.exists():
        return f"`ds-pretrain prepare` makes token files of the text in {given}"
    return _OPEN


def reason(error: OSError) -> str:
    """Return why a file cannot be opened, as a sentence."""
    return "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error.strerror}"


def _parse_header(path: Path | Url, header: bytes) -> tuple[int, int, int]:
    """Return (dtype code, number of sequences, length of the document index). Raises ConfigError."""
    where = str(path)
    if header[: len(MAGIC)] != MAGIC:
        raise ConfigError(where, found=f"first bytes {header[:9]!r}", expected=f"{MAGIC!r}", remedy=REWRITE)
    if len(header) < HEADER.size:
        raise ConfigError(where, found=f"{len(header)} bytes (truncated)",
                          expected=f"a header of {HEADER.size} bytes", remedy=REWRITE)
    _, version, code, num_sequences, index_length = HEADER.unpack(header)
    if version != 1:
        raise ConfigError(where, found=f"version {version}", expected="version 1", remedy=REWRITE)
    if code not in DTYPES:
        why = " (float in one of Megatron-LM and GPT-NeoX, unsigned in the other)" if code in (6, 7) else ""
        raise ConfigError(where, found=f"dtype code {code}{why}",
                          expected="1 u8, 2 i8, 3 i16, 4 i32, 5 i64 or 8 u16", remedy=REWRITE)
    return code, num_sequences, index_length


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron-LM and GPT-NeoX infer for a vocabulary: uint16 up to 65,499, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size <= _LARGEST_UINT16_VOCAB else np.int32)


def check_entries(index: IndexFile, *, sampled: bool = False) -> None:
    """Check that all entries agree with one another, or runs of entries that are spread over the file.

    Raises ConfigError.
    """
    checked = end = 0  # sequences; byte of the .bin at which the last of them ends
    for first, last in _runs(index.num_sequences, sampled):
        end = _check_sequences(index, first, last, expected=end if first == checked else None, at_least=end)
        checked = last
    previous = 0
    for first, last in _runs(index.num_index_entries, sampled):
        previous = _check_documents(index, first, last, previous=previous)
    _check_ends(index)


def _runs(total: int, sampled: bool) -> Iterator[tuple[int, int]]:
    if not sampled:
        return ranges(0, total, CHUNK_ENTRIES)
    return ((first, min(first + RUN_ENTRIES, total)) for first in spread(total, RUN_ENTRIES))


def ranges(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """Divide [first, last) into ranges of at most `size`."""
    return ((start, min(start + size, last)) for start in range(first, last, size))


def _check_ends(index: IndexFile) -> None:
    """Check the first and last entry of the document index. Raises ConfigError.

    The last one may be less than the number of sequences: see `IndexedDataset`.
    """
    if not index.num_index_entries:
        raise _documents_error(index, "without entries")
    first, last = int(index.document_index(0, 1)[0]), index.document_end
    if first != 0 or not 0 <= last <= index.num_sequences:
        raise _documents_error(index, f"from {first} to {last}")


def _check_sequences(index: IndexFile, first: int, last: int, *, expected: int | None, at_least: int = 0) -> int:
    """Check the sequences [first, last). Return the byte of the .bin at which the last one ends.

    `expected`: byte at which the first one must begin; None: any that is not below `at_least`.
    """
    if first == last:
        return at_least
    lengths = index.lengths(first, last).astype(np.int64)
    pointers = index.pointers(first, last)
    if int(lengths.min()) < 0:
        raise ConfigError(str(index.path), found=f"a sequence of {lengths.min()} tokens", expected="at least 0 tokens",
                          remedy=REWRITE)
    if expected is None:
        expected = int(pointers[0])
        if expected < at_least or expected % index.dtype.itemsize:
            raise ConfigError(str(index.path), found=f"sequence {first} at byte {expected} of the .bin",
                              expected=f"a multiple of {index.dtype.itemsize}, at least {at_least}", remedy=REWRITE)
    ends = expected + np.cumsum(lengths) * index.dtype.itemsize
    starts = np.concatenate([np.array([expected], np.int64), ends[:-1]])
    _check_equal(index, first, pointers, starts)
    return int(ends[-1])


def _check_equal(index: IndexFile, first: int, pointers: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(pointers != starts)
    if len(wrong):
        number = int(wrong[0])
        after = f", where sequence {first + number - 1} ends" if first + number else ""
        raise ConfigError(str(index.path), found=f"sequence {first + number} at byte {pointers[number]} of the .bin",
                          expected=f"byte {starts[number]}{after}", remedy=REWRITE)


def _check_documents(index: IndexFile, first: int, last: int, *, previous: int) -> int:
    """Check that the entries [first, last) of the document index rise from `previous`. Return the last one."""
    entries = index.document_index(first, last)
    if first == last:
        return previous
    if entries[0] < previous or not bool((entries[1:] >= entries[:-1]).all()):
        raise _documents_error(index, f"that falls between its entries {first} and {last}")
    return int(entries[-1])


def _documents_error(index: IndexFile, found: str) -> ConfigError:
    return ConfigError(str(index.path), found=f"a document index {found}",
                       expected=f"values that rise from 0 to {index.num_sequences}", remedy=REWRITE)
