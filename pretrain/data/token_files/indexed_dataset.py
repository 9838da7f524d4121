"""Read token files: pairs of `.bin` and `.idx` (their format: index_file.py), and their `.meta.json`."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.hashes import DataHashes, hashes_path, read_hashes
from pretrain.data.token_files.index_file import REWRITE, IndexFile, check_entries, reason
from pretrain.data.token_files.token_file import TokenFile, TokenFiles, TokenReader, Url, token_files_at
from pretrain.errors import ConfigError, reason_of
from pretrain.remote import is_url
from pretrain.stored_json import build, parse_json, read_object

_SAMPLES, _SAMPLE_TOKENS = 64, 1024  # samples of the .bin that the fingerprint has
_RANGE_FACTOR = 32  # a range of entries is read at once if at most this many times the wanted entries are in it


class IndexedDataset:
    """A `.bin/.idx` pair as one flat stream of tokens, divided into documents. Tokens are read on demand.

    Entries of the .idx are also read on demand. The constructor checks all entries of a small .idx, and runs of entries
    of a large one; `ds-pretrain data verify` checks all entries of any .idx.

    Attributes: num_tokens, num_documents, num_sequences, dtype of the file, notes (one line each), hashes (of every
    byte; None until they are known); prefix, which is a Url for data at a URL; small_files, prefix of the files other
    than the .bin: for data at a URL, of their copies on this disk.
    Raises ConfigError that names the file if the pair is missing, truncated or inconsistent.
    """

    def __init__(self, prefix: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        """`settings`: of the extensions that read data at URLs, by their names."""
        self.prefix: Path | Url = Url(prefix) if isinstance(prefix, str) and is_url(prefix) else Path(prefix)
        self.small_files, self._idx_sha256 = Path(prefix), ""  # SHA-256 of a large .idx
        self.bin_path, self.idx_path = (type(self.prefix)(f"{prefix}{suffix}") for suffix in (".bin", ".idx"))
        files: TokenFiles | None = None
        if isinstance(self.prefix, Url):
            files = token_files_at(self.prefix, settings)
            self.small_files, self._idx_sha256 = files.copy_small_files()
        self.index = IndexFile(self.idx_path, None if files is None else Path(f"{self.small_files}.idx"))
        check_entries(self.index, sampled=not self.index.is_small)
        self.dtype: np.dtype[Any] = self.index.dtype
        self.num_sequences = self.index.num_sequences
        self.num_tokens = self._offset_of_sequence(self.num_sequences)
        self.num_documents = self.index.num_index_entries - 1
        self.notes: tuple[str, ...] = ()
        self.url_note = "" if files is None else files.note  # a note at the start of a run
        self._each_sequence_is_a_document = False
        self._check_last_document()
        self.file = self._open_bin(files)
        self.hashes: DataHashes | None = None
        self._check_uploaded_hashes()

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of the flat stream as int64 [stop - start]."""
        return self.raw_tokens(start, stop).astype(np.int64)

    def raw_tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens [start, stop) of the flat stream in the dtype of the file."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"{self.bin_path}: tokens [{start}, {stop}) of {self.num_tokens}")
        content = self.file.read(start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize)
        return np.frombuffer(content, self.dtype.newbyteorder("<"))

    def tokens_at(self, starts: Sequence[int] | npt.NDArray[np.int64], length: int) -> npt.NDArray[np.integer]:
        """Return `length` tokens from each start [n] on, [n, length], in the dtype of the file."""
        first = np.asarray(starts, np.int64)
        return self.pieces(first, np.full(len(first), length)).reshape(-1, length)

    def pieces(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
        """Return lengths[i] tokens from starts[i] on, piece after piece, [sum(lengths)], in the dtype of the file."""
        if starts.size and not 0 <= int(starts.min()) <= int((starts + lengths).max()) <= self.num_tokens:
            raise IndexError(f"{self.bin_path}: pieces beyond the {self.num_tokens} tokens")
        width = self.dtype.itemsize
        tokens = np.empty(int(lengths.sum()), self.dtype.newbyteorder("<"))
        self.file.read_pieces((starts * width).tolist(), (lengths * width).tolist(), tokens.view(np.uint8))
        return tokens

    def document_offset(self, document: int) -> int:
        """Return the number of tokens before a document; before num_documents: of all tokens."""
        return int(self.document_offsets(document, document)[0])

    def document_offsets(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Return the bounds of the documents [first, last) in tokens, as int64 [last - first + 1].

        The document i has the tokens [bounds[i - first], bounds[i - first + 1]).
        """
        sequences = self.document_index(first, last)
        low, high = int(sequences[0]), int(sequences[-1])
        if high - low > _RANGE_FACTOR * len(sequences) + 1:  # documents of many sequences
            unique, inverse = np.unique(sequences, return_inverse=True)
            return np.array([self._offset_of_sequence(int(number)) for number in unique], np.int64)[inverse]
        return self.sequence_offsets(low, high)[sequences - low]

    def document_index(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Return the numbers of the first sequences of the documents [first, last], as int64 [last - first + 1].

        The document i has the sequences [numbers[i - first], numbers[i - first + 1]).
        """
        last = self.num_documents if last is None else last
        if not 0 <= first <= last <= self.num_documents:
            raise IndexError(f"{self.idx_path}: documents [{first}, {last}) of {self.num_documents}")
        if self._each_sequence_is_a_document:
            return np.arange(first, last + 1, dtype=np.int64)
        numbers = self.index.document_index(first, last + 1)
        if not 0 <= numbers[0] <= numbers[-1] <= self.num_sequences or not bool((numbers[1:] >= numbers[:-1]).all()):
            raise ConfigError(str(self.idx_path), problem=f"entries {first} to {last} of its document index do not "
                              f"rise within 0 to {self.num_sequences}", remedy=REWRITE)
        return numbers

    def sequence_lengths(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int32]:
        """Return the numbers of tokens of the sequences [first, last), as int32."""
        last = self.num_sequences if last is None else last
        if not 0 <= first <= last <= self.num_sequences:
            raise IndexError(f"{self.idx_path}: sequences [{first}, {last}) of {self.num_sequences}")
        return self.index.lengths(first, last)

    def sequence_offsets(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the bounds of the sequences [first, last) in tokens, as int64 [last - first + 1]."""
        pointers = self.index.pointers(first, min(last + 1, self.num_sequences)) // self.dtype.itemsize
        return np.append(pointers, self.num_tokens) if last == self.num_sequences else pointers

    def _offset_of_sequence(self, number: int) -> int:
        """Return the number of tokens before a sequence; before num_sequences: of all tokens."""
        if number < self.num_sequences:
            return int(self.index.pointers(number, number + 1)[0]) // self.dtype.itemsize
        if number == 0:
            return 0
        return self._offset_of_sequence(number - 1) + int(self.index.lengths(number - 1, number)[0])

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Content of PREFIX.meta.json; {} if there is none, or if it describes earlier data with this name."""
        meta = read_meta(self.small_files) or {}
        return meta if meta.get("num_tokens", self.num_tokens) == self.num_tokens else {}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the index and of 64 samples of the tokens; hashing all tokens would take minutes.

        Of a large index, only samples are hashed.
        """
        if self.index.is_small:
            return self.index.hash_with(self.sampled_bytes())
        return hashlib.sha256(b"samples of the index" + self.index.sampled_bytes() + self.sampled_bytes()).hexdigest()

    @property
    def idx_sha256(self) -> str:
        """SHA-256 of the .idx file; "": not known yet, because the file is large."""
        return self.index.sha256 if self.index.is_small else self._idx_sha256

    @idx_sha256.setter
    def idx_sha256(self, sha256: str) -> None:
        self._idx_sha256 = sha256

    def new_hashes(self, status: os.stat_result, blocks: tuple[str, ...]) -> DataHashes:
        """Return hashes of the .bin with this status."""
        idx = self.index.status
        return DataHashes(status.st_size, status.st_mtime_ns, self.idx_sha256, idx.st_size, idx.st_mtime_ns,
                          blocks)

    def is_described_by(self, hashes: DataHashes) -> bool:
        """Return whether these are hashes of the files as they are.

        A .bin and a large .idx are compared by size and modification time, a small .idx by its hash. Of a .bin at a
        URL, the modification time is the time of the upload, and is not compared.
        """
        if self.is_remote:
            return (hashes.bin_bytes, hashes.idx_sha256) == (self.file.status().st_size, self.idx_sha256)
        if not hashes.describes_bin(self.file.status()):
            return False
        if self.index.is_small:
            return hashes.idx_sha256 == self.index.sha256
        if hashes.describes_idx(self.index.file.status()):
            self._idx_sha256 = hashes.idx_sha256
            return True
        return self._idx_sha256 != "" and self._idx_sha256 == hashes.idx_sha256

    def known_sha256(self) -> str | None:
        """Return the SHA-256 of every byte; None if it is not known of the files as they are."""
        return self.hashes.sha256 if self.hashes is not None and self.is_described_by(self.hashes) else None

    def sampled_bytes(self) -> bytes:
        """Read 64 samples of 1024 tokens each, at fixed positions that are spread over the .bin."""
        length = min(self.num_tokens, _SAMPLE_TOKENS)
        starts = np.linspace(0, self.num_tokens - length, _SAMPLES).astype(np.int64)
        return self.pieces(starts, np.full(_SAMPLES, length)).tobytes()

    def _check_last_document(self) -> None:
        """If the document index ends too early, let each sequence be a document.

        `merge_file_` of older versions of GPT-NeoX and Megatron-LM (megatron/data/indexed_dataset.py) adds no entries
        to the document index.
        """
        last = self.index.document_end
        if last == self.num_sequences:
            return
        self._each_sequence_is_a_document, self.num_documents = True, self.num_sequences
        self.notes = (f"{self.idx_path}: its document index ends at sequence {last} of {self.num_sequences}, as merged "
                      "files of older versions of GPT-NeoX and Megatron-LM do: each sequence is taken as a document",)

    @property
    def address(self) -> str:
        """The prefix, or the URL with its credentials: not for messages."""
        return self.prefix.address if isinstance(self.prefix, Url) else str(self.prefix)

    @property
    def is_remote(self) -> bool:
        """True if the data is at a URL."""
        return isinstance(self.prefix, Url)

    def _check_uploaded_hashes(self) -> None:
        """Raise ConfigError if the .sha256.json at a URL is of other files."""
        hashes = None
        if self.is_remote:
            with contextlib.suppress(ValueError):  # damaged: reported by those who use it
                hashes = read_hashes(hashes_path(self.small_files))
        if hashes is not None and hashes.idx_sha256 and not self.is_described_by(hashes):
            raise ConfigError(f"{self.prefix}.sha256.json", problem="it is of another .idx or .bin: not all files of "
                              "the data set were uploaded, or a file is damaged",
                              remedy="upload all of them again; without this file, nothing is compared")

    def _open_bin(self, files: TokenFiles | None) -> TokenReader:
        """Open the .bin, and check that it has the size that the .idx describes."""
        try:
            file: TokenReader = TokenFile(Path(str(self.bin_path))) if files is None else files.open_tokens()
            found = file.status().st_size
        except OSError as error:
            raise ConfigError(str(self.bin_path), problem=reason(error), remedy=REWRITE) from None
        expected = self.num_tokens * self.dtype.itemsize
        if found != expected:
            size = "truncated" if found < expected else "too long"
            raise ConfigError(str(self.bin_path), found=f"{found} bytes ({size}, or of another .idx)",
                              expected=f"{expected} bytes ({self.num_tokens} tokens of {self.dtype.name})",
                              remedy=REWRITE)
        return file


def open_checked(prefix: str) -> IndexedDataset:
    """Open a data set and check every entry of its index. Raises ConfigError."""
    data = IndexedDataset(prefix)
    if not data.index.is_small:
        check_entries(data.index)
    return data


def check_same_tokenizer(sources: Sequence[tuple[str, IndexedDataset]]) -> None:
    """Raise ConfigError if two of the data sets, each with its name in messages, have different tokenizers."""
    known = [(where, data.meta) for where, data in sources if data.meta.get("tokenizer_sha256")]
    for where, meta in known[1:]:
        first, meta_of_first = known[0]
        if meta["tokenizer_sha256"] != meta_of_first["tokenizer_sha256"]:
            raise ConfigError(where, problem=f"it was prepared with another tokenizer ({_tokenizer_name(meta)}) than "
                              f"{first} ({_tokenizer_name(meta_of_first)})",
                              remedy="prepare all data with the same tokenizer")


def _tokenizer_name(meta: dict[str, Any]) -> str:
    return f"{meta.get('tokenizer', 'tokenizer')}, SHA-256 {meta['tokenizer_sha256'][:12]}"


def meta_path(prefix: str | Path) -> Path:
    """Return the path of the .meta.json of a data set."""
    return Path(f"{prefix}.meta.json")


def read_meta(prefix: str | Path) -> dict[str, Any] | None:
    """Read PREFIX.meta.json (vocab_size, tokenizer_sha256, ...). Return None if there is no such file.

    Raises ConfigError for a file that cannot be read or has invalid values.
    """
    path: Path | Url = Url(f"{prefix}.meta.json") if isinstance(prefix, str) and is_url(prefix) else meta_path(prefix)
    try:
        if isinstance(path, Url):
            content = token_files_at(Url(str(prefix))).read_small_file(".meta.json")
            if content is None:
                return None
            meta = build(dict[str, Any], parse_json(content))
        else:
            meta = read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = f"it cannot be read as JSON: {reason_of(error)}"
        raise ConfigError(str(path), problem=problem, remedy=REWRITE) from None
    for key, (is_valid, expected) in _META_CHECKS.items():
        value = meta.get(key)
        if value is not None and (isinstance(value, bool) or not is_valid(value)):
            raise ConfigError(f"{path}: {key}", found=json.dumps(value), expected=expected, remedy=REWRITE)
    return meta


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


_META_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("vocab_size", "num_tokens", "num_documents", "max_token", "bos_token", "eod_token"),
                    (_is_count, "a whole number, at least 0")),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (lambda value: isinstance(value, str), "a string")),
    "entropy_nats": (lambda value: isinstance(value, (int, float)) and 0 <= value < 100, "a number of nats"),
}
