"""Append tokenized batches to the partial output, in order: complete documents, duplicates, long documents, counts."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_rows import document_rows
from pretrain.data.prepare.partial_output import DOCUMENTS, PartialOutput
from pretrain.data.prepare.seen_digests import DIGEST_BYTES, Digests, SeenDigests
from pretrain.data.prepare.summary import Statistics
from pretrain.data.prepare.tokenize_batch import TokenizedBatch
from pretrain.data.token_files.hashes import BLOCK_BYTES, hash_block

_READ_BYTES = 1 << 20
_LONGEST_DOCUMENT = 2**31 - 1  # lengths are int32
_MOST_COUNTED = 1 << 25  # documents up to which duplicates are counted without --deduplicate: a table of 1 GiB


@dataclass
class OpenDocument:
    """A document that continues in the next batch. Its tokens are at the end of the file of tokens."""

    start: int
    """byte of the file of tokens at which it begins"""
    place: str
    text_bytes: int = 0
    failure: tuple[str, str] | None = None
    """place and reason, if a part of it cannot be read"""
    is_removed: bool = False
    """whether it has been counted as skipped, empty or duplicate: the rest of its tokens is dropped"""


class DocumentWriter:
    """Writes documents into a PartialOutput. `state` and `DocumentWriter(..., state=...)` resume it."""

    def __init__(self, output: PartialOutput, dtype: npt.DTypeLike, *, vocab_size: int, special_tokens: int,
                 deduplicate: bool, state: dict[str, Any] | None) -> None:
        """special_tokens: number of tokens (BOS, EOD) that each document has besides the tokens of its text."""
        self.statistics = Statistics(np.zeros(vocab_size, np.int64))
        self._open: OpenDocument | None = None
        self._counts_duplicates = True
        if state is not None:
            self.statistics = Statistics.from_json(state["statistics"])
            self._open = OpenDocument(**state["open"]) if state["open"] else None
            self._counts_duplicates = state["counts_duplicates"]
        self._output, self._files, self._dtype = output, output.files, np.dtype(dtype).newbyteorder("<")
        self._special_tokens, self._deduplicate = special_tokens, deduplicate
        self._seen: SeenDigests | None = None
        if self._counts_duplicates:
            digests = self._files["digests"]
            self._seen = SeenDigests(output.path / "seen", digests.path, num_logged=digests.size // DIGEST_BYTES)

    def state(self) -> dict[str, Any]:
        """Return what a resume needs, as JSON values."""
        return {"statistics": self.statistics.to_json(), "counts_duplicates": self._counts_duplicates,
                "open": dataclasses.asdict(self._open) if self._open else None}

    @property
    def num_tokens(self) -> int:
        """Tokens in the file, including the tokens of a document that is not complete."""
        return self._files["tokens"].size // self._dtype.itemsize

    @property
    def num_documents(self) -> int:
        return self.statistics.documents

    @property
    def is_inside_document(self) -> bool:
        return self._open is not None

    def add(self, batch: TokenizedBatch, save: Callable[[], None]) -> None:
        """Append the documents of the next batch. Raises OSError if they cannot be written.

        `save` saves the state with the position at which this batch begins.
        """
        statistics = self.statistics
        tokens, ends, text_bytes, digests = batch.tokens, batch.ends, batch.text_bytes, batch.digests
        if self._open is not None:
            size = int(ends[0]) if len(ends) else len(tokens)
            self._continue(self._open, tokens[:size], int(text_bytes[0]), batch.head_failure)
            if len(ends) == 0:
                return
            self._end(self._open, save)
            tokens, ends, text_bytes, digests = tokens[size:], ends[1:] - size, text_bytes[1:], digests[1:]
        statistics.empty += batch.empty
        for place, reason in batch.skipped:
            statistics.skip(place, reason)
        size = int(ends[-1]) if len(ends) else 0
        self._add_complete(tokens[:size], np.diff(ends, prepend=0), text_bytes[: len(ends)], digests)
        statistics.add_longest(batch.longest_tokens, batch.longest_place)
        if batch.tail_place:
            self._open = OpenDocument(self._files["tokens"].size, batch.tail_place)
            self._continue(self._open, tokens[size:], int(text_bytes[-1]), batch.tail_failure)
        self._hash_blocks()

    def _add_complete(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64],
                      text_bytes: npt.NDArray[np.int64], digests: Digests) -> None:
        is_new = self._find_new(digests)
        if is_new is not None:
            self._files["digests"].append(digests[is_new].tobytes())
        if is_new is not None and not is_new.all():
            self.statistics.duplicates += int((~is_new).sum())
            if self._deduplicate:
                tokens = tokens[np.repeat(is_new, lengths)]
                lengths, text_bytes, digests = lengths[is_new], text_bytes[is_new], digests[is_new]
        self._files["tokens"].append(tokens.astype(self._dtype, copy=False).data)
        self._add_lengths(lengths, text_bytes, digests)
        self.statistics.add_documents(tokens, lengths, int(text_bytes.sum()))

    def _add_lengths(self, lengths: npt.NDArray[np.int64], text_bytes: npt.NDArray[np.int64], digests: Digests) -> None:
        """Append what is stored of each document that is kept, besides its tokens."""
        self._files["lengths"].append(lengths.astype("<i4").tobytes())
        if DOCUMENTS in self._files:
            self._files[DOCUMENTS].append(document_rows(text_bytes, digests).tobytes())

    def _find_new(self, digests: Digests) -> npt.NDArray[np.bool_] | None:
        """Return whether each document is no duplicate; None if duplicates are no longer counted."""
        if self._seen is None:
            return None
        if not self._deduplicate and self._files["digests"].size >= _MOST_COUNTED * DIGEST_BYTES:
            self._counts_duplicates = False
            self.close()
            return None
        return self._seen.add(digests)

    def _continue(self, document: OpenDocument, tokens: npt.NDArray[Any], text_bytes: int,
                  failure: tuple[str, str] | None) -> None:
        """Append tokens of a document that does not end here."""
        self._files["tokens"].append(tokens.astype(self._dtype, copy=False).data)
        document.text_bytes += text_bytes
        document.failure = document.failure or failure

    def _end(self, document: OpenDocument, save: Callable[[], None]) -> None:
        """Complete a document of several batches, or remove it. Its tokens are read back from the file."""
        self._open = None
        length = (self._files["tokens"].size - document.start) // self._dtype.itemsize
        if document.is_removed:
            self._files["tokens"].cut(document.start)
        elif (digests := self._digest_if_kept(document, length)) is None:
            self._remove(document, save)
        else:
            for part in self._read_tokens(document.start):
                self.statistics.add_tokens(np.frombuffer(part, self._dtype))
            self._add_lengths(np.array([length]), np.array([document.text_bytes]), digests)
            self.statistics.add_documents(np.zeros(0, self._dtype), np.array([length]), document.text_bytes)
            self.statistics.add_longest(length, document.place)

    def _digest_if_kept(self, document: OpenDocument, length: int) -> Digests | None:
        """Return the digest [1, 2] of a complete document of several batches; count it and return None if it is not
        kept.
        """
        if length > _LONGEST_DOCUMENT:
            document.failure = document.failure or (document.place, f"the document has {length} tokens; at most "
                                                    f"{_LONGEST_DOCUMENT} are possible")
        if document.failure is not None:
            self.statistics.skip(*document.failure)
            return None
        if length <= self._special_tokens:
            self.statistics.empty += 1
            return None
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in self._read_tokens(document.start):
            digest.update(part)
        digests = np.frombuffer(digest.digest(), np.uint64).reshape(1, 2)
        is_new = self._find_new(digests)
        if is_new is not None and is_new[0]:
            self._files["digests"].append(digests.tobytes())
        elif is_new is not None:
            self.statistics.duplicates += 1
        return digests if is_new is None or is_new[0] or not self._deduplicate else None

    def _remove(self, document: OpenDocument, save: Callable[[], None]) -> None:
        """Remove the tokens at the end of the file. A saved state that needs them is replaced first."""
        tokens = self._files["tokens"]
        if document.start < self._output.saved_bytes("tokens"):
            tokens.size = document.start
            self._open = dataclasses.replace(document, is_removed=True)
            save()
            self._open = None
        tokens.cut(document.start)

    def _read_tokens(self, start: int) -> Iterator[bytes]:
        file = self._files["tokens"]
        for position in range(start, file.size, _READ_BYTES):
            yield os.pread(file.descriptor, min(_READ_BYTES, file.size - position), position)

    def _hash_blocks(self) -> None:
        """Hash the new complete blocks. Blocks that a removed document could change come later."""
        complete = self._open.start if self._open is not None else self._files["tokens"].size
        blocks, descriptor = self._files["blocks"], self._files["tokens"].descriptor
        for number in range(blocks.size // 32, complete // BLOCK_BYTES):
            blocks.append(bytes.fromhex(hash_block(descriptor, number)))

    def finish(self) -> tuple[str, ...]:
        """Complete the tokens and lengths. Return the hashes of all blocks."""
        assert self._open is None, "finish() inside a document"
        self._hash_blocks()
        blocks, tokens = self._files["blocks"], self._files["tokens"]
        content = os.pread(blocks.descriptor, blocks.size, 0)
        hashes = [content[start : start + 32].hex() for start in range(0, len(content), 32)]
        if tokens.size > len(hashes) * BLOCK_BYTES:
            hashes.append(hash_block(tokens.descriptor, len(hashes)))
        return tuple(hashes)

    @property
    def duplicates_are_counted(self) -> bool:
        """False if there were too many documents. The sizes of the batches have no effect."""
        is_full = not self._deduplicate and self._files["digests"].size >= _MOST_COUNTED * DIGEST_BYTES
        return self._counts_duplicates and not is_full

    def close(self) -> None:
        """Delete the table of digests, which a resume makes again."""
        if self._seen is not None:
            self._seen.close()
            self._seen = None
