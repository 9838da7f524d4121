"""Append tokenized batches to the partial output, in order: complete documents, duplicates, long documents, counts."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_rows import ORIGIN, DocumentFacts
from pretrain.data.prepare.duplicates.near_duplicates import NearDuplicates, NearSettings, make_records
from pretrain.data.prepare.duplicates.seen_digests import DIGEST_BYTES, Digests, SeenDigests
from pretrain.data.prepare.duplicates.signatures import EMPTY_SIGNATURE
from pretrain.data.prepare.partial_output import DOCUMENTS, PartialOutput
from pretrain.data.prepare.sources import InputFile, SourceCounts
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
    origin: tuple[int, int]
    """number of its input, line in it"""
    signature: list[int] | None = None
    """minimum of the signatures of its parts so far, if near-duplicates are looked for"""
    text_bytes: int = 0
    failure: tuple[str, str] | None = None
    """place and reason, if a part of it cannot be read"""
    is_removed: bool = False
    """whether it has been counted as skipped, empty or duplicate: the rest of its tokens is dropped"""


class DocumentWriter:
    """Writes documents into a PartialOutput. `state` and `DocumentWriter(..., state=...)` resume it."""

    def __init__(self, output: PartialOutput, dtype: npt.DTypeLike, *, vocab_size: int, special_tokens: int,
                 deduplicate: bool, near: NearSettings | None, files: Sequence[InputFile],
                 state: dict[str, Any] | None) -> None:
        """special_tokens: number of tokens (BOS, EOD) that each document has besides the tokens of its text.

        near: None also in a shard, whose near-duplicates a merge finds. files: all inputs, by their numbers.
        """
        self.statistics = Statistics(np.zeros(vocab_size, np.int64),
                                     sources={file.source: SourceCounts() for file in files})
        self._input_files, self._near_settings = files, near
        self._source_names = list(self.statistics.sources)
        numbers = {name: number for number, name in enumerate(self._source_names)}
        self._source_numbers = np.array([numbers[file.source] for file in files], np.int64)
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
        self._near: NearDuplicates | None = None
        if near is not None:
            self._near = NearDuplicates(output.path / "bands", self._files["signatures"], near.threshold)

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
        tokens, ends, first = batch.tokens, batch.ends, 0
        if self._open is not None:
            size = int(ends[0]) if len(ends) else len(tokens)
            self._continue(self._open, tokens[:size], batch, 0, batch.head_failure)
            if len(ends) == 0:
                return
            self._end(self._open, save)
            tokens, ends, first = tokens[size:], ends[1:] - size, 1
        statistics.empty += batch.empty
        statistics.divided += batch.divided
        for place, reason in batch.skipped:
            statistics.skip(place, reason)
        for number, counts in batch.quality.items():
            statistics.sources[self._input_files[number].source].add_quality(counts)
        size = int(ends[-1]) if len(ends) else 0
        self._add_complete(tokens[:size], np.diff(ends, prepend=0), batch.facts[first : len(batch.ends)])
        statistics.add_longest(batch.longest_tokens, batch.longest_place)
        if batch.tail_place:
            self._open = OpenDocument(self._files["tokens"].size, batch.tail_place, batch.origins[-1].item())
            self._continue(self._open, tokens[size:], batch, -1, batch.tail_failure)
        self._hash_blocks()

    def _add_complete(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64], facts: DocumentFacts) -> None:
        is_kept = self._choose(lengths, facts)
        if not is_kept.all():
            tokens = tokens[np.repeat(is_kept, lengths)]
            lengths, facts = lengths[is_kept], facts[is_kept]
        self._files["tokens"].append(tokens.astype(self._dtype, copy=False).data)
        self.statistics.add_tokens(tokens)
        self._add_facts(lengths, facts)

    def _choose(self, lengths: npt.NDArray[np.int64], facts: DocumentFacts) -> npt.NDArray[np.bool_]:
        """Return which complete documents are kept. Count duplicates, and remember the others."""
        is_kept = np.ones(len(lengths), np.bool_)
        is_new = self._find_new(facts.digests)
        if is_new is not None:
            self._files["digests"].append(facts.digests[is_new].tobytes())
            self.statistics.add_duplicates(self._counts_by_source(facts[~is_new]))
            if self._deduplicate:
                is_kept = is_new
        if self._near is not None and self._near_settings is not None:
            assert is_new is not None, "duplicates are counted"
            is_near = self._find_near(self._near, np.flatnonzero(is_new), lengths, facts)
            is_kept = is_kept & ~is_near if self._near_settings.removes else is_kept
        return is_kept

    def _find_near(self, near: NearDuplicates, documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64],
                   facts: DocumentFacts) -> npt.NDArray[np.bool_]:
        """Return whether each of all documents is a near-duplicate, of which only those at `documents` can be ones."""
        is_near = np.zeros(len(lengths), np.bool_)
        assert facts.signatures is not None, "a batch without signatures"
        for found in near.add(make_records(facts.origins[documents], facts.signatures[documents])):
            document = int(documents[found.index])
            is_near[document] = True
            file, line = facts.origins[document].item()
            self.statistics.add_near_duplicate(
                self._input_files[file].source, int(lengths[document]), place=self._input_files[file].place(line),
                earlier=self._input_files[found.earlier_input].place(found.earlier_line), similarity=found.similarity)
        return is_near

    def _counts_by_source(self, facts: DocumentFacts, weights: npt.NDArray[np.int64] | None = None) -> dict[str, int]:
        """Return the number of documents of each source, or the sum of weights (integers) of its documents."""
        numbers = self._source_numbers[facts.origins["input"]]
        sums = np.bincount(numbers, weights, len(self._source_names))
        return {self._source_names[number]: int(sums[number]) for number in np.flatnonzero(sums).tolist()}

    def _add_facts(self, lengths: npt.NDArray[np.int64], facts: DocumentFacts) -> None:
        """Append what is stored of each document that is kept, besides its tokens, and count it."""
        self._files["lengths"].append(lengths.astype("<i4").tobytes())
        if DOCUMENTS in self._files:
            self._files[DOCUMENTS].append(facts.rows().tobytes())
        self.statistics.add_documents(lengths, int(facts.text_bytes.sum()))
        self.statistics.add_to_sources(self._counts_by_source(facts), self._counts_by_source(facts, lengths),
                                       self._counts_by_source(facts, facts.text_bytes))

    def _find_new(self, digests: Digests) -> npt.NDArray[np.bool_] | None:
        """Return whether each document is no duplicate; None if duplicates are no longer counted."""
        if self._seen is None:
            return None
        if self._is_full:
            self._counts_duplicates = False
            self._seen.close()
            self._seen = None
            return None
        return self._seen.add(digests)

    @property
    def _is_full(self) -> bool:
        """True if there are too many documents to count duplicates that are kept."""
        counts_all = self._deduplicate or self._near_settings is not None
        return not counts_all and self._files["digests"].size >= _MOST_COUNTED * DIGEST_BYTES

    def _continue(self, document: OpenDocument, tokens: npt.NDArray[Any], batch: TokenizedBatch, index: int,
                  failure: tuple[str, str] | None) -> None:
        """Append tokens of a document that does not end here. index: of the document in the batch."""
        self._files["tokens"].append(tokens.astype(self._dtype, copy=False).data)
        document.text_bytes += int(batch.text_bytes[index])
        document.failure = document.failure or failure
        if batch.signatures is not None:
            before = EMPTY_SIGNATURE if document.signature is None else np.array(document.signature, np.uint32)
            document.signature = np.minimum(before, batch.signatures[index]).tolist()

    def _end(self, document: OpenDocument, save: Callable[[], None]) -> None:
        """Complete a document of several batches, or remove it. Its tokens are read back from the file."""
        self._open = None
        length = (self._files["tokens"].size - document.start) // self._dtype.itemsize
        if document.is_removed:
            self._files["tokens"].cut(document.start)
        elif (facts := self._facts_if_kept(document, length)) is None:
            self._remove(document, save)
        else:
            for part in self._read_tokens(document.start):
                self.statistics.add_tokens(np.frombuffer(part, self._dtype))
            self._add_facts(np.array([length]), facts)

    def _facts_if_kept(self, document: OpenDocument, length: int) -> DocumentFacts | None:
        """Return the facts about a complete document of several batches; count it and return None if it is not kept."""
        if length > _LONGEST_DOCUMENT:
            document.failure = document.failure or (document.place, f"the document has {length} tokens; at most "
                                                    f"{_LONGEST_DOCUMENT} are possible")
        if document.failure is not None:
            self.statistics.skip(*document.failure)
            return None
        if length <= self._special_tokens:
            self.statistics.empty += 1
            return None
        self.statistics.add_longest(length, document.place)  # also of a near-duplicate, which a shard cannot know
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in self._read_tokens(document.start):
            digest.update(part)
        facts = DocumentFacts(
            np.array([document.text_bytes]), np.frombuffer(digest.digest(), np.uint64).reshape(1, 2),
            np.array([tuple(document.origin)], ORIGIN),
            None if document.signature is None else np.array([document.signature], np.uint32))
        return facts if self._choose(np.array([length]), facts)[0] else None

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
        return self._counts_duplicates and not self._is_full

    def close(self) -> None:
        """Delete the tables, which a resume makes again."""
        if self._seen is not None:
            self._seen.close()
            self._seen = None
        if self._near is not None:
            self._near.close()
            self._near = None
