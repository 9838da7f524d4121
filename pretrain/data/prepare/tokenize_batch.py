"""Tokenize a batch of chunks. This runs in the worker processes."""

import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import ORIGIN, Documents, DocumentStep, Encode, Origins
from pretrain.data.prepare.hash_tables import DIGEST_BYTES, Digests
from pretrain.data.prepare.text_quality import FIELDS, is_sampled, measure
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import Skipped, documents, line_of
from pretrain.data.text_inputs.reader import Batch
from pretrain.data.text_inputs.text import divide
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError

LONGEST_TEXT = 1 << 20
"""characters that the tokenizer gets at once; a longer text is divided, to limit the memory"""
_Row = npt.NDArray[Any]
"""numbers of a text or a document, for the column of a step"""


@dataclass(frozen=True)
class TokenizeSettings:
    """Settings that determine the tokens of the documents."""

    tokenizer: str
    """path of the tokenizer's file"""
    bos_token: int | None
    """token that begins each document"""
    eod_token: int | None
    """token that ends each document"""
    dtype: str
    read: ReadSettings
    steps: tuple[DocumentStep, ...] = ()
    """steps of extensions, in their order"""
    sampled_fractions: tuple[float, ...] = ()
    """fraction of the documents of each input whose text is measured"""
    first_input: int = 0
    """number of the first input, of a shard"""

    @property
    def special_tokens(self) -> int:
        """Number of tokens that a document has besides the tokens of its text."""
        return (self.bos_token is not None) + (self.eod_token is not None)


@dataclass
class TokenizedBatch:
    """Tokens and counts of a batch. The first document may continue one of the batch before."""

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    """positions in `tokens` at which documents end"""
    text_bytes: npt.NDArray[np.int64]
    """bytes of the text of each document, and of the incomplete one at the end"""
    digests: Digests
    """hash of the tokens of each document; the hash of a continued first document is not used"""
    origins: Origins
    """input and line of each document, and of the incomplete one at the end"""
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """step -> numbers of the part in this batch of each document, and of the incomplete one at the end"""
    quality: dict[int, list[int]] = field(default_factory=dict)
    """input -> counts of the texts of its documents that were measured"""
    empty: int = 0
    longest_tokens: int = 0
    """tokens of the longest document that begins and ends in this batch"""
    longest_place: str = ""
    divided: int = 0
    """documents that begin in this batch, and are read in parts because they are long"""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """place and reason of each document that cannot be read"""
    head_failure: tuple[str, str] | None = None
    """place and reason, if the first document continues one of the batch before, and a part of it cannot be read"""
    tail_failure: tuple[str, str] | None = None
    """the same of a document that begins in this batch and does not end in it"""
    tail_place: str = ""
    """place of that document"""

    @property
    def documents(self) -> Documents:
        """The documents that end in this batch. Of one that continues, this is the part in the batch."""
        size = len(self.ends)
        return Documents(np.diff(self.ends, prepend=0), self.text_bytes[:size], self.digests, self.origins[:size],
                         {name: values[:size] for name, values in self.values.items()})


class TokenizeBatch:
    """The work of a worker process: tokenizes batches."""

    def __init__(self, settings: TokenizeSettings) -> None:
        """Load the tokenizer. Raises ConfigError."""
        self.settings = settings
        self.tokenizer = tokenizer = load_tokenizer(settings.tokenizer)
        self.encode: Encode = lambda texts, is_document: tokenizer.encode_batch(texts)
        for step in reversed(settings.steps):
            self.encode = step.encoder(tokenizer, self.encode)
        self.measured = [step for step in settings.steps if step.column is not None]
        self.empty_rows = [np.asarray(step.measure([""]))[0] for step in self.measured]
        """rows of a document before its first text"""

    def __call__(self, batch: Batch) -> TokenizedBatch | ConfigError:
        """Tokenize a batch, or return why a document cannot be read."""
        builder = _Builder(self, continues=batch.continues)
        begins, divided = not batch.continues, 0
        try:
            for text, tokens, place, ends, rows in self._encode(_texts(batch, self.settings), begins=begins):
                if isinstance(text, Skipped):
                    builder.fail(text, place)
                elif text:
                    builder.add(text, tokens, place, rows)
                if ends:
                    builder.end()
                divided += begins and not ends
                begins = ends
            return dataclasses.replace(builder.result(), divided=divided)
        except ConfigError as error:  # returned, so that it is raised after the batches before it are written
            return error

    def _encode(self, texts: "Iterator[_Text]", *, begins: bool) -> "Iterator[_EncodedText]":
        """Add the tokens and the rows to each text. Several texts are encoded at once, up to LONGEST_TEXT characters.

        begins: whether the first text begins a document.
        """
        group: list[_Text] = []
        is_document = list[bool]()  # whether each text in the group is a complete document
        size = 0
        for entry in itertools.chain(texts, [None]):
            length = 0 if entry is None or isinstance(entry[0], Skipped) else len(entry[0])
            if group and (entry is None or size + length > LONGEST_TEXT):
                content = [text for text, *_ in group if isinstance(text, str)]
                tokens, ends = self.encode(content, is_document)
                columns = [np.asarray(step.measure(content)) for step in self.measured]
                numbers, bounds = iter(range(len(content))), [0, *ends.tolist()]
                for text, place, is_end in group:
                    if isinstance(text, str):
                        number = next(numbers)
                        rows = [values[number] for values in columns]
                        yield text, tokens[bounds[number] : bounds[number + 1]], place, is_end, rows
                    else:
                        yield text, tokens[:0], place, is_end, []
                group, is_document, size = [], [], 0
            if entry is not None:
                group.append(entry)
                size += length
                if isinstance(entry[0], str):
                    is_document.append(begins and entry[2])
                begins = entry[2]


class TextPlace(NamedTuple):
    """Where a text comes from."""

    where: str
    """file and line, or row"""
    input: int


_Text = tuple[str | Skipped, TextPlace, bool]
_EncodedText = tuple[str | Skipped, npt.NDArray[Any], TextPlace, bool, list[_Row]]


def _texts(batch: Batch, settings: TokenizeSettings) -> Iterator[_Text]:
    """Yield (text that is short enough for the tokenizer, place, whether a document ends here)."""
    for chunk, number in zip(batch.chunks, batch.inputs, strict=True):
        for piece in documents(chunk, settings.read):
            place = TextPlace(piece.where, settings.first_input + number)
            if isinstance(piece, Skipped):
                yield piece, place, piece.ends_document
                continue
            parts = divide(piece.text, LONGEST_TEXT)
            for part in parts[:-1]:
                yield part, place, False
            yield parts[-1], place, piece.ends_document


def text_bytes(text: str) -> int:
    """Return the bytes of a text as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


class _Builder:
    """Collects the tokens of a batch."""

    def __init__(self, worker: TokenizeBatch, *, continues: bool) -> None:
        self._worker, self._settings = worker, worker.settings
        self._parts: list[Sequence[int] | npt.NDArray[Any]] = []
        self._size = 0
        self._ends: list[int] = []
        self._text_bytes: list[int] = []
        self._origins: list[tuple[int, int]] = []
        self._columns: list[list[_Row]] = [[] for _ in worker.measured]
        none = np.zeros(0, np.int64)
        self._batch = TokenizedBatch(none, none, none, np.zeros((0, 2), np.uint64), np.zeros(0, ORIGIN))
        self._begin(continues=continues)

    def _begin(self, *, continues: bool = False) -> None:
        """Begin a document, or with `continues`, the part of a document that is in this batch."""
        self._continues, self._is_open = continues, continues
        self._start, self._first_part = self._size, len(self._parts)
        self._bytes, self._place = 0, TextPlace("", -1)
        self._text = ""  # the text of a document that is read at once
        self._rows = self._worker.empty_rows
        self._failure: tuple[str, str] | None = None

    def add(self, text: str, tokens: Sequence[int] | npt.NDArray[Any], place: TextPlace,
            rows: list[_Row]) -> None:
        """Add a text of the current document."""
        self._text = text if not self._is_open else ""
        self._open(place)
        self._append(tokens)
        self._bytes += text_bytes(text)
        self._rows = [step.combine(*both) for step, *both in zip(self._worker.measured, self._rows, rows, strict=True)]

    def fail(self, piece: Skipped, place: TextPlace) -> None:
        """Mark the current document as one that cannot be read."""
        self._open(place)
        self._failure = self._failure or (piece.where, piece.reason)

    def _open(self, place: TextPlace) -> None:
        if not self._is_open:
            self._is_open, self._place = True, place
            if self._settings.bos_token is not None:
                self._append([self._settings.bos_token])

    def _append(self, tokens: Sequence[int] | npt.NDArray[Any]) -> None:
        self._parts.append(tokens)
        self._size += len(tokens)

    def end(self) -> None:
        """End the current document. A document that cannot be read, or is empty, is removed."""
        if self._is_open and self._settings.eod_token is not None:
            self._append([self._settings.eod_token])
        length = self._size - self._start
        if self._continues:
            self._batch.head_failure = self._failure
        elif self._failure is not None:
            self._batch.skipped.append(self._failure)
        elif length <= self._settings.special_tokens:
            self._batch.empty += 1
        elif length > self._batch.longest_tokens:
            self._batch.longest_tokens, self._batch.longest_place = length, self._place.where
        if self._continues or (self._failure is None and length > self._settings.special_tokens):
            self._ends.append(self._size)
            self._add_facts()
        else:
            del self._parts[self._first_part :]
            self._size = self._start
        self._begin()

    def _add_facts(self) -> None:
        """Add what is known about the current document besides its tokens."""
        self._text_bytes.append(self._bytes)
        number, where = self._place.input, self._place.where
        self._origins.append((number, line_of(where) if where else 0))
        for values, row in zip(self._columns, self._rows, strict=True):
            values.append(row)
        if self._text and is_sampled(self._text, self._settings.sampled_fractions[number]):
            before = self._batch.quality.get(number, [0] * len(FIELDS))
            self._batch.quality[number] = [*map(operator.add, before, measure(self._text))]

    def result(self) -> TokenizedBatch:
        """Return the batch. Raises ConfigError if the tokenizer gave tokens that it does not have."""
        batch, tokenizer = self._batch, self._worker.tokenizer
        if self._is_open:
            self._text = ""
            self._add_facts()
            if self._continues:
                batch.head_failure = self._failure
            else:
                batch.tail_failure, batch.tail_place = self._failure, self._place.where
        tokens = np.concatenate([np.zeros(0, np.int64), *self._parts])
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)][0]
            raise ConfigError(f"--tokenizer {tokenizer.path}", problem=f"it encodes a text with token {wrong}, and its "
                              f"vocabulary has only tokens 0 to {tokenizer.vocab_size - 1}",
                              remedy="correct or replace the tokenizer")
        batch.tokens = tokens.astype(self._settings.dtype)
        batch.ends, batch.text_bytes = np.array(self._ends, np.int64), np.array(self._text_bytes, np.int64)
        batch.digests, batch.origins = _digests(batch.tokens, self._ends), np.array(self._origins, ORIGIN)
        for step, empty, rows in zip(self._worker.measured, self._worker.empty_rows, self._columns, strict=True):
            batch.values[step.name] = np.array(rows, empty.dtype).reshape(-1, len(empty))
        return batch


def _digests(tokens: npt.NDArray[Any], ends: list[int]) -> Digests:
    """Return the 128-bit hash of the tokens of each document."""
    content, size = tokens.data.cast("B"), tokens.itemsize
    start, digests = 0, bytearray()
    for end in ends:
        digests += hashlib.blake2b(content[start * size : end * size], digest_size=DIGEST_BYTES).digest()
        start = end
    return np.frombuffer(bytes(digests), np.uint64).reshape(-1, 2)
