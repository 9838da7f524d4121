"""Tokenize a batch of chunks. This runs in the worker processes."""

import dataclasses
import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_rows import ORIGIN, DocumentFacts, Origins
from pretrain.data.prepare.duplicates.seen_digests import DIGEST_BYTES, Digests
from pretrain.data.prepare.duplicates.signatures import EMPTY_SIGNATURE, NUM_VALUES, Sign, make_sign
from pretrain.data.prepare.fill_in_middle import Arrangement, FillInMiddleEncoder
from pretrain.data.prepare.text_quality import FIELDS, is_sampled, measure
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import Skipped, documents, line_of
from pretrain.data.text_inputs.reader import Batch
from pretrain.data.text_inputs.text import divide
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError

LONGEST_TEXT = 1 << 20
"""characters that the tokenizer gets at once; a longer text is divided, to limit the memory"""
Encode = Callable[[Sequence[str], Sequence[bool]], tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
"""texts, and whether each is a complete document -> tokens of all texts, and the position at which each text ends"""


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
    fill_in_middle: Arrangement | None = None
    has_signatures: bool = False
    """whether near-duplicates are looked for"""
    sampled_fractions: tuple[float, ...] = ()
    """of each input: fraction of its documents whose text is measured"""
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
    signatures: npt.NDArray[Any] | None
    """of the part in this batch of each document, and of the incomplete one at the end"""
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
    def facts(self) -> DocumentFacts:
        """Facts about the documents that end in this batch."""
        size = len(self.ends)
        signatures = None if self.signatures is None else self.signatures[:size]
        return DocumentFacts(self.text_bytes[:size], self.digests, self.origins[:size], signatures)


def make_tokenize(settings: TokenizeSettings) -> Callable[[Batch], TokenizedBatch | ConfigError]:
    """Load the tokenizer, and return the function that tokenizes a batch, or returns why a document cannot be read."""
    tokenizer = load_tokenizer(settings.tokenizer)
    encode = FillInMiddleEncoder(tokenizer, settings.fill_in_middle).encode if settings.fill_in_middle else (
        lambda texts, is_document: tokenizer.encode_batch(texts))
    sign = make_sign() if settings.has_signatures else None
    return functools.partial(_tokenize, settings, tokenizer, encode, sign)


def _tokenize(settings: TokenizeSettings, tokenizer: Tokenizer, encode: Encode, sign: Sign | None,
              batch: Batch) -> TokenizedBatch | ConfigError:
    builder = _Builder(settings, continues=batch.continues)
    begins, divided = not batch.continues, 0
    try:
        texts = _encode(_texts(batch, settings), encode, sign, continues=batch.continues)
        for text, tokens, place, ends, signature in texts:
            if isinstance(text, Skipped):
                builder.fail(text, place)
            elif text:
                builder.add(text, tokens, place, signature)
            if ends:
                builder.end()
            divided += begins and not ends
            begins = ends
        return dataclasses.replace(builder.result(tokenizer), divided=divided)
    except ConfigError as error:  # returned, so that it is raised after the batches before it are written
        return error


class TextPlace(NamedTuple):
    """Where a text comes from."""

    where: str
    """file and line, or row"""
    input: int


_Text = tuple[str | Skipped, TextPlace, bool]
_EncodedText = tuple[str | Skipped, npt.NDArray[Any], TextPlace, bool, npt.NDArray[np.uint32] | None]


def _encode(texts: Iterator[_Text], encode: Encode, sign: Sign | None, *, continues: bool) -> Iterator[_EncodedText]:
    """Add the tokens and the signature to each text. Several texts are encoded at once, up to LONGEST_TEXT characters.
    """
    group: list[_Text] = []
    is_document = list[bool]()  # of the texts in the group: whether the text is a complete document
    begins, size = not continues, 0
    for entry in itertools.chain(texts, [None]):
        length = 0 if entry is None or isinstance(entry[0], Skipped) else len(entry[0])
        if group and (entry is None or size + length > LONGEST_TEXT):
            content = [text for text, *_ in group if isinstance(text, str)]
            tokens, ends = encode(content, is_document)
            signatures = iter(sign(content) if sign is not None else ())
            bounds = iter(itertools.pairwise([0, *ends.tolist()]))
            for text, place, is_end in group:
                start, stop = next(bounds) if isinstance(text, str) else (0, 0)
                signature = next(signatures, None) if isinstance(text, str) else None
                yield text, tokens[start:stop], place, is_end, signature
            group, is_document, size = [], [], 0
        if entry is not None:
            group.append(entry)
            size += length
            if isinstance(entry[0], str):
                is_document.append(begins and entry[2])
            begins = entry[2]


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

    def __init__(self, settings: TokenizeSettings, *, continues: bool) -> None:
        self._settings = settings
        self._parts: list[Sequence[int] | npt.NDArray[Any]] = []
        self._size = 0
        self._ends: list[int] = []
        self._text_bytes: list[int] = []
        self._origins: list[tuple[int, int]] = []
        self._signatures: list[npt.NDArray[np.uint32]] = []
        none = np.zeros(0, np.int64)
        self._batch = TokenizedBatch(none, none, none, np.zeros((0, 2), np.uint64), np.zeros(0, ORIGIN), None)
        self._begin(continues=continues)

    def _begin(self, *, continues: bool = False) -> None:
        """Begin a document, or with `continues`, the part of a document that is in this batch."""
        self._continues, self._is_open = continues, continues
        self._start, self._first_part = self._size, len(self._parts)
        self._bytes, self._place = 0, TextPlace("", -1)
        self._text = ""  # of a document that is read at once
        self._signature = EMPTY_SIGNATURE
        self._failure: tuple[str, str] | None = None

    def add(self, text: str, tokens: Sequence[int] | npt.NDArray[Any], place: TextPlace,
            signature: npt.NDArray[np.uint32] | None) -> None:
        """Add a text of the current document."""
        self._text = text if not self._is_open else ""
        self._open(place)
        self._append(tokens)
        self._bytes += text_bytes(text)
        if signature is not None:
            self._signature = np.minimum(self._signature, signature)

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
        self._signatures.append(self._signature)
        if self._text and is_sampled(self._text, self._settings.sampled_fractions[number]):
            before = self._batch.quality.get(number, [0] * len(FIELDS))
            self._batch.quality[number] = [*map(operator.add, before, measure(self._text))]

    def result(self, tokenizer: Tokenizer) -> TokenizedBatch:
        """Return the batch. Raises ConfigError if the tokenizer gave tokens that it does not have."""
        batch = self._batch
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
        if self._settings.has_signatures:
            batch.signatures = np.array(self._signatures, np.uint32).reshape(-1, NUM_VALUES)
        return batch


def _digests(tokens: npt.NDArray[Any], ends: list[int]) -> Digests:
    """Return the 128-bit hash of the tokens of each document."""
    content, size = tokens.data.cast("B"), tokens.itemsize
    start, digests = 0, bytearray()
    for end in ends:
        digests += hashlib.blake2b(content[start * size : end * size], digest_size=DIGEST_BYTES).digest()
        start = end
    return np.frombuffer(bytes(digests), np.uint64).reshape(-1, 2)
