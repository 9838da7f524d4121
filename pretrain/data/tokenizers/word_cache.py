"""Encode texts word by word, so that each distinct word is encoded once.

A word is a part of a text between two positions that no token can span. Texts are UTF-8. Words of up to 15 bytes are
found with numpy in a hash table, whose keys are the bytes and the length. Longer words are found in a dictionary.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[Any]
EncodeWords = Callable[[Sequence[bytes]], tuple[Integers, Integers]]
EncodeBatch = Callable[[Sequence[str]], tuple[Integers, npt.NDArray[np.int64]]]
"""returns the tokens of all texts one after another, and the position at which each text ends"""
END, SPACE_SYMBOL = b"\xff", b"\xfe"
"""bytes that UTF-8 never has: the end of a text, and a U+2581 that is encoded as bytes"""
_UNKNOWN, _END_ENTRY, _SPACE_SYMBOL_ENTRY = 0, 1, 2
_WINDOW_BYTES = 1 << 16  # the arrays of one window fit into the cache of a core
_MOST_WORDS = 1 << 18  # about 60 MB. After this number, the cache is emptied
_LONGEST_WORD = 64  # bytes, at least _LONGEST_KEY; longer words are not kept
_LONGEST_KEY = 15  # bytes
_TABLE_BITS = 19
_WHOLE_WINDOWS = 16  # number of windows that are not divided into words, after one with too many new words
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)


class _GrowingArray:
    """An array to which values are appended in amortized constant time."""

    def __init__(self, values: Integers) -> None:
        self._buffer, self.size = values, len(values)

    def append(self, values: Integers) -> None:
        needed = self.size + len(values)
        if needed > len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(needed, self._buffer.dtype)))
        self._buffer[self.size : needed] = values
        self.size = needed

    @property
    def values(self) -> Integers:
        return self._buffer[: self.size]


class WordCache:
    """A bounded cache of words and their tokens.

    Args:
        can_cut: bool [65536], whether no token spans two adjacent bytes x and y, at 256 * x + y.
        encode_words: returns the tokens of words one after another, and the number of tokens of each word.
        dtype: of the tokens.
        space_symbol: tokens of SPACE_SYMBOL.
    """

    def __init__(self, can_cut: npt.NDArray[np.bool_], encode_words: EncodeWords, *, dtype: npt.DTypeLike,
                 space_symbol: Sequence[int]) -> None:
        self._can_cut, self._encode_words, self.dtype = can_cut, encode_words, np.dtype(dtype)
        self._space_symbol = np.array(space_symbol, self.dtype)
        self._whole_windows = 0  # number of the next windows that are not divided
        self._is_divided = True
        self._clear()

    def _clear(self) -> None:
        self._entries = {END: _END_ENTRY, SPACE_SYMBOL: _SPACE_SYMBOL_ENTRY}
        self._tokens = _GrowingArray(self._space_symbol)
        self._starts = _GrowingArray(np.array([0, 0, 0, len(self._space_symbol)], np.int64))  # of entry i in _tokens
        self._kept = self._starts.size, self._tokens.size
        self._slots = np.full(1 << _TABLE_BITS, _UNKNOWN, np.int32)
        self._keys = np.zeros((2, 1 << _TABLE_BITS), np.uint64)

    def encode(self, texts: Sequence[bytes]) -> tuple[Integers, npt.NDArray[np.int64]]:
        """Return the tokens of all texts one after another, and the position at which each text ends."""
        data = END.join([*texts, b""])
        padded = data + bytes(16)
        tokens, ends = [np.zeros(0, self.dtype)], [np.zeros(0, np.int64)]
        position, num_tokens = 0, 0
        while position < len(data):
            if self._starts.size > _MOST_WORDS:
                self._clear()
            borders = self._borders(padded, position, len(data))
            entries = self._look_up(padded, borders)
            starts, values = self._starts.values, self._tokens.values
            counts = starts[entries + 1] - starts[entries]
            stops = np.cumsum(counts)
            tokens.append(values[np.repeat(starts[entries] - (stops - counts), counts) + np.arange(stops[-1])])
            ends.append(stops[entries == _END_ENTRY] + num_tokens)
            position, num_tokens = int(borders[-1]), num_tokens + int(stops[-1])
            self._starts.size, self._tokens.size = self._kept  # forget the words that are too long to be kept
        return np.concatenate(tokens), np.concatenate(ends)

    def _borders(self, padded: bytes, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the borders of the words in a window that begins at `start`. The first one is `start`."""
        size, cuts = _WINDOW_BYTES // 2, np.zeros(0, np.int64)
        while not len(cuts):  # twice, if a word is longer than a window
            size = min(2 * size, stop - start)
            window = np.frombuffer(padded, np.uint8, size + 1, start)
            pairs = window[:-1].astype(np.uint16) << 8
            pairs |= window[1:]
            if start + size == stop:
                pairs[-1] = 256 * END[0]
            cuts = np.flatnonzero(self._can_cut[pairs])
        borders = np.concatenate(([0], cuts + 1))
        self._is_divided = not self._whole_windows
        if not self._is_divided:
            self._whole_windows -= 1
            is_special = window >= SPACE_SYMBOL[0]
            kept = is_special[borders] | is_special[borders - 1]
            kept[[0, -1]] = True
            borders = borders[kept]
        return borders + start

    def _look_up(self, padded: bytes, borders: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the entry of each word [borders[i], borders[i + 1]). New words are encoded and get an entry."""
        lengths = np.diff(borders)
        eight_bytes = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # those that begin at each position
        keys = np.stack((eight_bytes[borders[:-1]] & _MASKS[np.minimum(lengths, 8)],
                         eight_bytes[borders[:-1] + 8] & _MASKS[np.clip(lengths - 8, 0, 7)]))
        keys[1] |= lengths.astype(np.uint64) << np.uint64(56)
        mixed = (keys[0] * _MULTIPLIERS[0] ^ keys[1] * _MULTIPLIERS[1]) * _MULTIPLIERS[0]
        slots = (mixed >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
        is_found = (self._keys[0][slots] == keys[0]) & (self._keys[1][slots] == keys[1]) & (lengths <= _LONGEST_KEY)
        entries = np.where(is_found, self._slots[slots], _UNKNOWN).astype(np.int64)
        missing = np.flatnonzero(entries == _UNKNOWN)
        if len(missing):
            words = [padded[start:stop] for start, stop in
                     zip(borders[missing].tolist(), borders[missing + 1].tolist(), strict=True)]
            entries[missing] = self._entries_of(words, num_bytes=int(lengths.sum()))
            stored = missing[(lengths[missing] <= _LONGEST_KEY) & (self._slots[slots[missing]] == _UNKNOWN)]
            self._slots[slots[stored]] = entries[stored]
            self._keys[:, slots[stored]] = keys[:, stored]
        return entries

    def _entries_of(self, words: list[bytes], *, num_bytes: int) -> list[int]:
        """Return the entries of words that are not in the hash table. `num_bytes` is the size of the window."""
        found = list(map(self._entries.get, words, itertools.repeat(_UNKNOWN)))
        new = list(dict.fromkeys(word for word, entry in zip(words, found, strict=True) if entry == _UNKNOWN))
        if not new:
            return found
        # A window that was not divided is a new word itself. A small window says little about the text.
        if self._is_divided and num_bytes > _WINDOW_BYTES // 2 and sum(map(len, new)) > num_bytes // 2:
            self._whole_windows = _WHOLE_WINDOWS
        new.sort(key=lambda word: len(word) > _LONGEST_WORD)  # the words that are kept come first
        tokens, counts = self._encode_words(new)
        first, num_kept = self._starts.size - 1, sum(len(word) <= _LONGEST_WORD for word in new)
        added = dict(zip(new, range(first, first + len(new)), strict=True))
        self._starts.append(self._tokens.size + np.cumsum(counts))
        self._tokens.append(tokens)
        self._entries.update(itertools.islice(added.items(), num_kept))
        self._kept = first + num_kept + 1, int(self._starts.values[first + num_kept])
        return [entry or added[word] for word, entry in zip(words, found, strict=True)]
