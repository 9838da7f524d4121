"""MinHash signatures of texts, for near-duplicates. The worker processes make them.

A text becomes a set of shingles: each 5 consecutive words, in lower case and without punctuation. The fraction of equal
values in two signatures estimates the Jaccard similarity of the sets, with a standard deviation of at most 4.4%
(0.5 / sqrt(128)). 5 words are what FineWeb (arXiv:2406.17557, appendix E) and Lee et al. (arXiv:2107.06499) use.
"""

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.shuffled import finalize
from pretrain.errors import import_package

NUM_VALUES = 128
SHINGLE_WORDS = 5
_SEED = 1
_BLOCK_CHARACTERS = 1 << 16  # texts are hashed together up to this size: the arrays remain in the processor's cache

Signatures = npt.NDArray[np.uint32]
"""[n, NUM_VALUES]. The signature of a text of several parts is the minimum of theirs, apart from shingles at the cuts.
A text without words has the largest number in all places."""
Hashes = npt.NDArray[np.uint64]
_Indices = npt.NDArray[np.int64]


def sign(texts: Sequence[str]) -> Signatures:
    """Return the signatures of texts. Raises ConfigError without the library rensa."""
    digest_matrix = import_package("rensa", "--near_duplicates", "dedup").RMinHash.digest_matrix_from_flat_token_hashes
    rows: list[Signatures] = [np.zeros((0, NUM_VALUES), np.uint32)]
    for start, stop in _blocks(texts):
        hashes, offsets = shingles(texts[start:stop])
        matrix = digest_matrix(hashes, offsets.astype(np.uint64), NUM_VALUES, _SEED)
        rows.append(np.array(matrix.to_rows(), np.uint32))
    return np.concatenate(rows)


def signature_version() -> str:
    """Return a short hash of the signatures of a fixed text: versions of rensa (0.4 and 0.5) may make different ones.

    Raises ConfigError without rensa.
    """
    text = " ".join(f"word{number}" for number in range(1000))
    return f"{zlib.crc32(sign([text, text[:50], '']).tobytes()):08x}"


def _blocks(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive texts that are hashed together."""
    blocks, start, size = [], 0, 0
    for number, text in enumerate(texts):
        if size and size + len(text) > _BLOCK_CHARACTERS:
            blocks.append((start, number))
            start, size = number, 0
        size += len(text) + 1
    return [*blocks, (start, len(texts))] if start < len(texts) else blocks


def shingles(texts: Sequence[str]) -> tuple[Hashes, _Indices]:
    """Return the hashes of the shingles of all texts, and the offsets at which the shingles of each text begin [n + 1].

    A text of fewer words than a shingle has one shingle of all its words.
    """
    lowered = [text.lower() for text in texts]
    text_starts = np.cumsum([0, *(len(text) + 1 for text in lowered)])
    words, starts = _words("\n".join(lowered) + "\n")
    bounds = np.searchsorted(starts, text_starts)  # number of words before each text
    owner = np.repeat(np.arange(len(texts)), np.diff(bounds))
    hashes = np.zeros(len(words), np.uint64)
    words, owner = np.append(words, np.zeros(SHINGLE_WORDS, np.uint64)), np.append(owner, [-1] * SHINGLE_WORDS)
    count = len(hashes)
    for place in range(SHINGLE_WORDS):
        same_text = owner[place : place + count] == owner[:count]
        hashes = hashes * _FACTOR + words[place : place + count] * same_text
    last = SHINGLE_WORDS - 1
    is_shingle = owner[last : last + count] == owner[:count]
    is_shingle[bounds[:-1][np.diff(bounds) > 0]] = True  # short texts; the first shingle of others is complete
    kept = np.flatnonzero(is_shingle)
    return finalize(hashes[kept]), np.searchsorted(kept, bounds)


_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
_INVERSE = np.uint64(pow(int(_FACTOR), -1, 1 << 64))


def _words(text: str) -> tuple[Hashes, _Indices]:
    """Return the hash and the position of each word. Letters and digits are words; so is each character of scripts
    that are written without spaces, such as Chinese."""
    if text.isascii():
        codes: npt.NDArray[Any] = np.frombuffer(text.encode(), np.uint8)
        is_word, begins = _ascii_words()[codes], None
    else:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        is_word, begins = _word_characters(codes)
    before = np.zeros(len(codes), np.bool_)
    before[1:] = is_word[:-1]
    if begins is None:
        edges = np.flatnonzero(is_word != before)  # text ends with a line feed: each word has an end
        starts, stops = edges[::2], edges[1::2]
    else:
        starts = np.flatnonzero(is_word & (begins | ~before))
        stops = np.flatnonzero(before & (begins | ~is_word))
    powers, inverses = _powers(1 << max(len(codes) - 1, 1).bit_length())
    values = (_ascii_values()[codes] if begins is None else finalize(codes.astype(np.uint64) + np.uint64(1)))
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(values * powers[: len(codes)], out=sums[1:])
    return finalize((sums[stops] - sums[starts]) * inverses[starts]), starts


@cache
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Return the first powers of the factor, and of its inverse."""
    return tuple(np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - 1, base)]), dtype=np.uint64)  # type: ignore[return-value]
                 for base in (_FACTOR, _INVERSE))


@cache
def _ascii_words() -> npt.NDArray[np.bool_]:
    return np.array([chr(code).isalnum() for code in range(128)])


@cache
def _ascii_values() -> Hashes:
    return finalize(np.arange(1, 129, dtype=np.uint64))


def _word_characters(codes: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether each character is part of a word, and whether it begins one although a word precedes it."""
    # Latin-1 punctuation; general punctuation and symbols; CJK punctuation; full-width ASCII punctuation
    is_word = (codes >= 0xC0) & ((codes < 0x2000) | (codes >= 0x2C00)) & ((codes < 0x3000) | (codes > 0x303F)) \
        & ((codes < 0xFF00) | (codes > 0xFF0F))
    is_ascii = codes < 128
    is_word[is_ascii] = _ascii_words()[codes[is_ascii]]
    # Thai, Lao; Myanmar; Khmer; from the CJK radicals to the Yi syllables; planes beyond the first
    is_single = ((codes >= 0xE00) & (codes < 0xF00)) | ((codes >= 0x1000) & (codes < 0x10A0)) \
        | ((codes >= 0x1780) & (codes < 0x1800)) | ((codes >= 0x2E80) & (codes < 0xA4D0)) | (codes >= 0x10000)
    is_single &= is_word
    begins = is_single.copy()
    begins[1:] |= is_single[:-1]
    return is_word, begins & is_word
