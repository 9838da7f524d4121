"""Windows of an evaluation: each token counts once, with the stated context, and its bytes are counted once."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.analysis.evaluate.token_windows import Tokens, WindowSet, rolling_windows
from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.data.tokenizers.tokenizer import Tokenizer, encode_bytes

EOD = 256


def byte_tokenizer(eod: int | None = EOD) -> Tokenizer:
    """Return a tokenizer whose tokens are the bytes of the text, and the end-of-document token 256."""
    return Tokenizer(Path("bytes"), TokenIds(257, None, eod, None, None), "", encode_bytes,
                     decode=lambda tokens: bytes(token for token in tokens if token < EOD).decode(errors="replace"))


def windows_of(flat: list[int], ranges: list[tuple[int, int]], length: int, stride: int, *, charged: bool = False,
               masked_after: int | None = None) -> WindowSet:
    array = np.array(flat, np.int64)

    def tokens(start: int, stop: int) -> Tokens:
        assert 0 <= start <= stop <= len(array)
        return array[start:stop]

    return rolling_windows("x", tokens, ranges, seq_length=length, stride=stride, first_token_counts=charged,
                           masked_after=masked_after)


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("size", [2, 8, 9, 10, 16, 17, 50])
def test_each_token_is_predicted_once_with_the_longest_context(size: int, stride: int) -> None:
    length = 8
    windows = windows_of([*range(100, 100 + size), 5, 6], [(0, size)], length, stride)
    inputs, targets, weights, _ = windows.batch(range(len(windows)), len(windows) + 2)
    assert weights[len(windows):].sum() == 0
    predicted = [(int(targets[row, column]), int(inputs[row, column]), column)
                 for row, column in zip(*np.nonzero(weights), strict=True)]
    assert [target for target, *_ in predicted] == list(range(101, 100 + size))
    assert all(target == before + 1 for target, before, _ in predicted)
    # after the first window, at least length - stride tokens precede the first new token of a window
    assert all(column >= min(target - 101, length - stride) for target, _, column in predicted)
    assert len(windows) == 1 + max(0, -(-(size - 1 - length) // stride))


def test_documents_are_separate_and_single_tokens_count() -> None:
    flat, ranges = [EOD, 1, 2, 3, EOD, 4, EOD, 5, 6], [(0, 4), (4, 6), (6, 9)]
    windows = windows_of(flat, ranges, 2, 2)
    inputs, targets, weights, alone = windows.batch(range(len(windows)), len(windows))
    assert targets[weights > 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs[2:, 0].tolist() == [EOD, EOD]  # each document begins with its own context
    assert alone.sum() == 0
    assert windows.target_ranges() == [(1, 4), (5, 6), (7, 9)]
    without = windows_of([1, 2, 3, 4, 5, 6], [(0, 3), (3, 4), (4, 6)], 2, 2, charged=True)
    _, targets, weights, alone = without.batch(range(len(without)), len(without))
    assert targets[weights > 0].tolist() == [2, 3, 6]
    assert alone.tolist() == [1, 1, 1]
    assert without.target_ranges() == [(0, 6)]


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (5, 2), (64, 1)])
def test_bytes_of_the_text_are_counted_once(length: int, stride: int) -> None:
    texts = ["Grüße, Welt", "a", "κόσμος και 世界", "plain"]
    flat = [token for text in texts for token in (EOD, *text.encode())]
    ends = np.cumsum([1 + len(text.encode()) for text in texts]).tolist()
    separate = windows_of(flat, list(zip([0, *ends], ends, strict=False)), length, stride)
    total = sum(len(text.encode()) for text in texts)
    assert separate.decoded_bytes(byte_tokenizer()) == total
    joined = windows_of(flat, [(0, len(flat))], length, stride)  # as in a .bin file
    assert joined.decoded_bytes(byte_tokenizer()) == total
    assert sum(joined.decoded_bytes(byte_tokenizer(), part, 3) for part in range(3)) == total


def test_masked_tokens_count_neither_as_tokens_nor_as_bytes() -> None:
    flat = [*b"abc", EOD, *b"xyz", EOD, *b"q"]
    windows = windows_of(flat, [(0, len(flat))], 4, 4, masked_after=EOD)
    _, targets, weights, _ = windows.batch(range(len(windows)), len(windows))
    assert targets[weights > 0].tolist() == [*b"bc", EOD, *b"yz", EOD]
    assert windows.decoded_bytes(byte_tokenizer()) == len("bcyz")


def test_batches_are_as_long_as_their_longest_window() -> None:
    windows = windows_of([EOD, 1, EOD, 2, 3, 4, 5, EOD, 6, 7], [(0, 2), (2, 7), (7, 10)], 8, 8)
    assert windows.by_length().tolist() == [1, 2, 0]
    assert [windows.batch(indices, 2)[0].tolist() for indices in ([1, 2], [0], [])] == [
        [[EOD, 2, 3, 4], [EOD, 6, 0, 0]], [[EOD], [0]], [[0], [0]]]


def test_the_first_windows() -> None:
    windows = windows_of(list(range(65, 90)), [(0, 25)], 4, 4)
    assert windows.first(99) is windows
    first = windows.first(2)
    assert (len(first), first.target_ranges(), first.decoded_bytes(byte_tokenizer(None))) == (2, [(1, 9)], 8)
