"""Append tokenized batches to the partial output, in order: complete documents, duplicates, long documents, counts."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import ORIGIN, Documents, DocumentStep, InputFile
from pretrain.data.prepare.hash_tables import DIGEST_BYTES, Digests, SeenDigests
from pretrain.data.prepare.partial_output import DOCUMENTS, PartialOutput, file_of_step
from pretrain.data.prepare.summary import SourceCounts, Statistics
from pretrain.data.prepare.tokenize_batch import TokenizedBatch
from pretrain.data.token_files.hashes import BLOCK_BYTES, hash_block

if TYPE_CHECKING:
    from pretrain.data.prepare.complete import DataFacts

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
    values: dict[str, list[Any]] = field(default_factory=dict)
    """step -> combined numbers of its parts so far"""
    text_bytes: int = 0
    failure: tuple[str, str] | None = None
    """place and reason, if a part of it cannot be read"""
    is_removed: bool = False
    """whether it has been counted as skipped, empty or duplicate: the rest of its tokens is dropped"""


class DocumentWriter:
    """Writes documents into a PartialOutput. `state` and `DocumentWriter(..., state=...)` resume it."""

    def __init__(self, output: PartialOutput, facts: "DataFacts", steps: Sequence[DocumentStep],
                 files: Sequence[InputFile], *, is_shard: bool = False, state: dict[str, Any] | None = None) -> None:
        """steps: in their order; in a shard, they keep all documents. files: all inputs, by their numbers."""
        self.statistics = Statistics(np.zeros(facts.vocab_size, np.int64),
                                     sources={file.source: SourceCounts() for file in files})
        self._input_files, self._steps, self._is_shard = files, steps, is_shard
        self._source_names = list(self.statistics.sources)
        numbers = {name: number for number, name in enumerate(self._source_names)}
        self._source_numbers = np.array([numbers[file.source] for file in files], np.int64)
        self._open: OpenDocument | None = None
        self._counts_duplicates = True
        if state is not None:
            self.statistics = Statistics.from_json(state["statistics"])
            self._open = OpenDocument(**state["open"]) if state["open"] else None
            self._counts_duplicates = state["counts_duplicates"]
            for step in steps:
                step.state = state["steps"][step.name]
        self._output, self._files, self._dtype = output, output.files, np.dtype(facts.dtype).newbyteorder("<")
        self._special_tokens, self._deduplicate = facts.special_tokens, facts.deduplicate
        self._columns = {step.name: step.column for step in steps if step.column is not None}
        self._seen: SeenDigests | None = None
        if self._counts_duplicates:
            digests = self._files["digests"]
            self._seen = SeenDigests(output.path / "seen", digests.path, num_logged=digests.size // DIGEST_BYTES)
        for step in steps:
            step.inputs, step.file = files, self._files.get(file_of_step(step.name))

    def state(self) -> dict[str, Any]:
        """Return what a resume needs, as JSON values."""
        return {"statistics": self.statistics.to_json(), "counts_duplicates": self._counts_duplicates,
                "steps": {step.name: step.state for step in self._steps},
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
        self._add_complete(tokens[:size], batch.documents[first:])
        statistics.add_longest(batch.longest_tokens, batch.longest_place)
        if batch.tail_place:
            self._open = OpenDocument(self._files["tokens"].size, batch.tail_place, batch.origins[-1].item())
            self._continue(self._open, tokens[size:], batch, -1, batch.tail_failure)
        self._hash_blocks()

    def _add_complete(self, tokens: npt.NDArray[Any], documents: Documents) -> None:
        is_kept = self._choose(documents)
        if not is_kept.all():
            tokens = tokens[np.repeat(is_kept, documents.num_tokens)]
            documents = documents[is_kept]
        self._files["tokens"].append(tokens.astype(self._dtype, copy=False).data)
        self.statistics.add_tokens(tokens)
        self._add_documents(documents)

    def _choose(self, documents: Documents) -> npt.NDArray[np.bool_]:
        """Return which complete documents are kept. Count exact duplicates, and remember the others."""
        is_kept = np.ones(len(documents), np.bool_)
        is_new = self._find_new(documents.digests)
        if is_new is not None:
            self._files["digests"].append(documents.digests[is_new].tobytes())
            self.statistics.add_duplicates(self._counts_by_source(documents[~is_new]))
            if self._deduplicate:
                is_kept = is_new.copy()
        if not self._is_shard:
            documents = dataclasses.replace(documents, is_new=is_new)
            for step in self._steps:
                left = np.flatnonzero(is_kept)
                base, count = step.column or ("<i8", 0)
                values = documents.values.get(step.name, np.zeros((len(documents), count)))[left].astype(base)
                kept = step.keep(documents[left], values)
                if kept is not None:
                    is_kept[left] = kept
        return is_kept

    def _counts_by_source(self, documents: Documents, weights: npt.NDArray[np.int64] | None = None) -> dict[str, int]:
        """Return the number of documents of each source, or the sum of weights (integers) of its documents."""
        numbers = self._source_numbers[documents.origins["input"]]
        sums = np.bincount(numbers, weights, len(self._source_names))
        return {self._source_names[number]: int(sums[number]) for number in np.flatnonzero(sums).tolist()}

    def _add_documents(self, documents: Documents) -> None:
        """Append what is stored of each document that is kept, besides its tokens, and count it."""
        self._files["lengths"].append(documents.num_tokens.astype("<i4").tobytes())
        if self._is_shard:
            self._files[DOCUMENTS].append(documents.rows(self._columns).tobytes())
        self.statistics.add_documents(documents.num_tokens, int(documents.text_bytes.sum()))
        self.statistics.add_to_sources(self._counts_by_source(documents),
                                       self._counts_by_source(documents, documents.num_tokens),
                                       self._counts_by_source(documents, documents.text_bytes))

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
        counts_all = self._deduplicate or any(step.exact_duplicates for step in self._steps)
        return not counts_all and self._files["digests"].size >= _MOST_COUNTED * DIGEST_BYTES

    def _continue(self, document: OpenDocument, tokens: npt.NDArray[Any], batch: TokenizedBatch, index: int,
                  failure: tuple[str, str] | None) -> None:
        """Append tokens of a document that does not end here. index: of the document in the batch."""
        self._files["tokens"].append(tokens.astype(self._dtype, copy=False).data)
        document.text_bytes += int(batch.text_bytes[index])
        document.failure = document.failure or failure
        for step in self._steps:
            if step.name in batch.values:
                new, before = batch.values[step.name][index], document.values.get(step.name)
                document.values[step.name] = (new if before is None else step.combine(before, new)).tolist()

    def _end(self, document: OpenDocument, save: Callable[[], None]) -> None:
        """Complete a document of several batches, or remove it. Its tokens are read back from the file."""
        self._open = None
        length = (self._files["tokens"].size - document.start) // self._dtype.itemsize
        if document.is_removed:
            self._files["tokens"].cut(document.start)
        elif (complete := self._complete_if_kept(document, length)) is None:
            self._remove(document, save)
        else:
            for part in self._read_tokens(document.start):
                self.statistics.add_tokens(np.frombuffer(part, self._dtype))
            self._add_documents(complete)

    def _complete_if_kept(self, document: OpenDocument, length: int) -> Documents | None:
        """Return a complete document of several batches, as the only one; count it, and return None, if it is not kept.
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
        self.statistics.add_longest(length, document.place)  # also of a near-duplicate, which a shard cannot know
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in self._read_tokens(document.start):
            digest.update(part)
        complete = Documents(
            np.array([length]), np.array([document.text_bytes]),
            np.frombuffer(digest.digest(), np.uint64).reshape(1, 2), np.array([tuple(document.origin)], ORIGIN),
            {name: np.array([row]) for name, row in document.values.items()})
        return complete if self._choose(complete)[0] else None

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
        """Delete the table of digests, which a resume makes again."""
        if self._seen is not None:
            self._seen.close()
            self._seen = None
