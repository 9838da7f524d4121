"""The .idx file of a data set. Its entries are read on demand, so that its size matters neither for time nor memory."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.files.index_format import DTYPES, HEADER, LENGTH_DTYPE, MAGIC, OFFSET_DTYPE, REWRITE
from pretrain.data.files.token_file import TokenFile
from pretrain.errors import ConfigError

SMALL_INDEX_BYTES = 64 * 2**20  # up to this size, a start reads every entry of the .idx: about 0.1 s
SAMPLED_RUNS, RUN_ENTRIES = 128, 512  # of a larger .idx, a start reads this many runs of entries
_CHUNK_BYTES = 2**20
_OPEN = "give the prefix of a .bin/.idx pair, without .bin; tools/prepare_data.py writes one"


class IndexFile:
    """An open .idx file with a valid header and the size that the header describes.

    Raises ConfigError that names the file otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = TokenFile(path)
            self.status = self.file.status()  # of the file that was opened
            self.num_bytes = self.status.st_size
            header = self.file.read(0, min(self.num_bytes, HEADER.size))
        except OSError as error:
            raise ConfigError(str(path), problem=reason(error), remedy=_OPEN) from None
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

    def _entries(self, dtype: np.dtype[Any], start: int, first: int, last: int) -> npt.NDArray[Any]:
        try:
            content = self.file.read(start + first * dtype.itemsize, (last - first) * dtype.itemsize)
        except OSError as error:  # a disk or a network that fails
            raise ConfigError(str(self.path), problem=reason(error), remedy="start again when it can be read") from None
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


def reason(error: OSError) -> str:
    """Return why a file cannot be opened, as a sentence."""
    return "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error.strerror}"


def _parse_header(path: Path, header: bytes) -> tuple[int, int, int]:
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
