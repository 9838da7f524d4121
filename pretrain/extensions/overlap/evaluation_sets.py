"""Read evaluation sets: token files, or text that is encoded with the tokenizer of the training data."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import Piece, read_pieces
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.text_inputs.text import divide
from pretrain.data.text_inputs.url_files import is_remote
from pretrain.data.token_files.indexed_dataset import IndexedDataset, check_same_tokenizer
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.overlap.ngrams import Numbers
from pretrain.hub import recorded_tokenizer
from pretrain.remote import open_file_system, with_retries, without_credentials

_FLAG = "--against"
_GROUP_CHARACTERS = 1 << 20  # characters of texts that are encoded at once
_MOST_TOKENS = 2**30  # most tokens of a set: an index of them takes about 100 GB


@dataclass(frozen=True)
class EvaluationSet:
    """The documents of one value of --against."""

    name: str
    tokens: npt.NDArray[Any]
    """of all documents, without the tokens that begin and end a document"""
    ends: Numbers
    """positions in `tokens` at which the documents end"""
    places: tuple[str, ...] | None = None
    """file and line of each document; None: of a token file, whose documents have numbers"""

    def place(self, document: int) -> str:
        return f"document {document}" if self.places is None else self.places[document]


def find_tokenizer(train: IndexedDataset, name: str | None) -> Tokenizer | None:
    """Return the tokenizer of the training data, from --tokenizer or the .meta.json; None if neither names one.

    Raises ConfigError if it is another tokenizer than the data's.
    """
    recorded = train.meta.get("tokenizer")
    if name is None and not recorded:
        return None
    try:
        tokenizer = load_tokenizer(name or recorded_tokenizer(str(recorded)))
    except ConfigError as error:
        if name is not None:
            raise
        raise ConfigError.from_line(f"{train.prefix}.meta.json names this tokenizer: {error}") from None
    sha256 = train.meta.get("tokenizer_sha256")
    if sha256 and sha256 != tokenizer.fingerprint:
        raise ConfigError(f"--tokenizer {tokenizer.path}", problem=f"{train.prefix} was prepared with another one: "
                          f"SHA-256 {sha256[:12]}, not {tokenizer.fingerprint[:12]}",
                          remedy="give the tokenizer of the training data")
    return tokenizer


def read_set(word: str, train: IndexedDataset, tokenizer: Tokenizer | None, read: ReadSettings) -> EvaluationSet:
    """Read the documents of a value of --against. Raises ConfigError."""
    if _is_prefix(word):
        found = _token_file(word, train)
    elif tokenizer is None:
        raise ConfigError(f"{_FLAG} {word}", problem=f"to encode it, the tokenizer of {train.prefix} must be known, "
                          "which has no .meta.json that names it", remedy="give it by --tokenizer")
    else:
        found = _text(word, tokenizer, read)
        _check_size(word, len(found.tokens))
    return found


def _is_prefix(word: str) -> bool:
    """Return whether a value of --against is the prefix of token files, on a disk or in a store."""
    if not is_remote(word):
        return Path(f"{word}.idx").exists() and not Path(word).exists()
    if "*" in word or "?" in word:
        return False
    name = without_credentials(word)
    system, path = open_file_system(f"{word}.idx", f"{_FLAG} {name}")
    return bool(with_retries(lambda: system.exists(path), name))


def _check_size(word: str, num_tokens: int) -> None:
    if num_tokens > _MOST_TOKENS:
        raise ConfigError(f"{_FLAG} {word}", found=f"{num_tokens:,} tokens", expected=f"at most {_MOST_TOKENS:,}",
                          remedy="give a smaller evaluation set")


def _token_file(prefix: str, train: IndexedDataset) -> EvaluationSet:
    data = IndexedDataset(prefix)
    if os.path.realpath(data.small_files) == os.path.realpath(train.small_files):
        raise ConfigError(f"{_FLAG} {prefix}", problem="it is the training data itself")
    check_same_tokenizer([(str(train.prefix), train), (prefix, data)])
    _check_size(prefix, data.num_tokens)
    tokens, ends = data.raw_tokens(0, data.num_tokens), data.document_offsets()[1:]
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    keep = np.ones(len(tokens), np.bool_)
    is_full = ends > starts
    for places, token in ((starts[is_full], data.meta.get("bos_token")),
                          (ends[is_full] - 1, data.meta.get("eod_token"))):
        if token is not None:
            keep[places[tokens[places] == token]] = False
    return EvaluationSet(prefix, tokens[keep], np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])[ends])


def _text(word: str, tokenizer: Tokenizer, read: ReadSettings) -> EvaluationSet:
    parts, lengths, places = [np.zeros(0, tokenizer.ids.dtype)], list[int](), list[str]()
    length = 0
    for pieces in _groups(read_pieces(find_inputs([word], read).files, read)):
        tokens, ends = tokenizer.encode_batch([piece.text for piece in pieces])
        parts.append(tokens)
        for piece, size in zip(pieces, np.diff(ends, prepend=0).tolist(), strict=True):
            length += size
            if piece.ends_document:
                lengths.append(length)
                places.append(piece.where)
                length = 0
    return EvaluationSet(word, np.concatenate(parts), np.cumsum(np.array(lengths, np.int64)), tuple(places))


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Divide long pieces, and group short ones, up to about _GROUP_CHARACTERS characters."""
    group, size = list[Piece](), 0
    for piece in pieces:
        *parts, last = divide(piece.text, _GROUP_CHARACTERS)
        inner = [piece._replace(text=text, ends_document=False) for text in parts]
        for part in [*inner, piece._replace(text=last)]:
            group.append(part)
            size += len(part.text)
            if size >= _GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group
