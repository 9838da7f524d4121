"""Samples in the order of Megatron-LM or GPT-NeoX, so that a run that began there continues with the same samples.

Both shuffle the documents of all epochs, put them one behind another, cut this stream into samples that overlap by one
token, and shuffle the samples. The order follows from seed, split, seq_length and the number of samples of the run:

| | Megatron-LM (megatron/core/datasets/gpt_dataset.py) | GPT-NeoX (megatron/data/gpt2_dataset.py) |
| --- | --- | --- |
| last epoch | shuffled apart if the run needs less than 80% of its samples | shuffled with all others |
| split | rounds each bound | rounds each size |

"Documents" are the sequences of the .idx in both. NumPy guarantees the numbers of RandomState for all its versions.
"""

import hashlib
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.dataset import Indices, check_num_tokens, file_record
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError

_SEPARATE_BELOW = 0.80  # gpt_dataset.py: threshold
_Numbers = npt.NDArray[np.int64]


class MegatronSamples:
    """Samples of the sequences [first_sequence, last_sequence) of a `.bin/.idx` pair.

    `order`: "megatron" or "neox". `num_samples`: those that the run was planned to read; the order depends on it.
    Memory: 8 bytes a sequence and 4 bytes a sequence and epoch, and 4 bytes a sample, in each process.
    """

    has_padding = False

    def __init__(self, indexed: IndexedDataset, *, order: str, seq_length: int, seed: int, num_samples: int,
                 first_sequence: int = 0, last_sequence: int | None = None, name: str = "train") -> None:
        self.indexed, self.order, self.seq_length, self.seed, self.name = indexed, order, seq_length, seed, name
        self.num_samples, self.first_sequence = num_samples, first_sequence
        self.last_sequence = indexed.num_sequences if last_sequence is None else last_sequence
        if not 0 <= seed < 2**32:
            raise ConfigError("--seed", found=str(seed), expected=f"0 to 4294967295 with --sample_order {order}")
        self._lengths = indexed.sequence_lengths(first_sequence, self.last_sequence)
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        check_num_tokens(indexed, self.num_tokens, seq_length=seq_length, name=name)
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        self._build_order()

    def _build_order(self) -> None:
        num_epochs = max(-(-(self.num_samples * self.seq_length + 1) // self.num_tokens), 1)
        total = (num_epochs * self.num_tokens - 1) // self.seq_length
        before_last = ((num_epochs - 1) * self.num_tokens - 1) // self.seq_length
        is_separate = self.order == "megatron" and num_epochs > 1 and \
            self.num_samples - before_last < int(_SEPARATE_BELOW * self.samples_per_epoch)
        random = np.random.RandomState(self.seed)
        epochs = (num_epochs - 1, 1) if is_separate else (num_epochs,)
        self._sequences = np.concatenate([self._shuffled_epochs(count, random) for count in epochs])
        bounds = (0, before_last, total) if is_separate else (0, total)
        self._samples = np.concatenate([_shuffled_range(first, last, total, random)
                                        for first, last in itertools.pairwise(bounds)])
        self.order_length = len(self._samples)
        self._file = PrefixSums(len(self._lengths), lambda numbers: self._lengths[numbers])
        self._stream = PrefixSums(len(self._sequences), lambda places: self._lengths[self._sequences[places]])

    def _shuffled_epochs(self, num_epochs: int, random: np.random.RandomState) -> npt.NDArray[Any]:
        dtype = np.int32 if len(self._lengths) < 2**31 else np.int64
        sequences = np.tile(np.arange(len(self._lengths), dtype=dtype), num_epochs)
        random.shuffle(sequences)
        return sequences

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        return (self.indexed,)

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples as integers [n, seq_length + 1]. Indices beyond the order begin again at its first sample.

        GPT-NeoX takes such indices modulo the number of samples less one (gpt2_dataset.py, __getitem__ and __len__).
        """
        positions = np.asarray(indices, np.int64)
        period = max(self.order_length - (self.order == "neox"), 1)
        numbers = self._samples[np.where(positions < self.order_length, positions, positions % period)]
        starts, lengths = self._pieces(numbers.astype(np.int64) * self.seq_length)
        return self.indexed.pieces(starts, lengths).reshape(-1, self.seq_length + 1)

    def _pieces(self, low: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return which pieces of the .bin the samples consist of that begin at `low` in the stream of all epochs."""
        high = low + self.seq_length + 1
        first, first_start = self._stream.find(low)
        last, _ = self._stream.find(high - 1)
        counts = last - first + 1
        sample = np.repeat(np.arange(len(low)), counts)
        piece_of_sample = np.cumsum(counts) - counts
        sequences = self._sequences[np.arange(len(sample)) - piece_of_sample[sample] + first[sample]]
        lengths = self._lengths[sequences].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        starts += (first_start - starts[piece_of_sample])[sample]
        left_out = np.maximum(low[sample] - starts, 0)
        ends = np.minimum(starts + lengths, high[sample])
        in_file = self._file.before(sequences.astype(np.int64)) + self._first_token
        return in_file + left_out, ends - starts - left_out

    @cached_property
    def _first_token(self) -> int:
        return int(self.indexed.sequence_offsets(self.first_sequence, self.first_sequence)[0])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of data, order, sequences, seq_length and num_samples. These and the seed determine the samples."""
        content = f"{self.indexed.fingerprint} {self.order} {self.first_sequence} {self.last_sequence} " \
                  f"{self.seq_length} {self.num_samples}"
        return hashlib.sha256(content.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint."""
        return {**file_record(self.indexed), "first_token": self._first_token,
                "last_token": self._first_token + self.num_tokens, "sample_order": self.order,
                "order_samples": self.num_samples}


def _shuffled_range(first: int, last: int, total: int, random: np.random.RandomState) -> npt.NDArray[Any]:
    numbers = np.arange(first, last, dtype=np.int64 if total >= 2**32 - 2 else np.uint32)
    random.shuffle(numbers)
    return numbers


_BLOCK = 64
_BLOCKS_AT_ONCE = 2**16  # lengths of 4 Mi elements
_Integers = npt.NDArray[np.int64]


class PrefixSums:
    """Positions of elements that lie one behind another. `lengths(numbers)` returns the lengths of these elements.

    A table of all positions would take 8 bytes for each element. This one takes 1/8 byte.
    """

    def __init__(self, num_elements: int, lengths: Callable[[_Integers], npt.NDArray[np.integer]]) -> None:
        self.num_elements, self._lengths = num_elements, lengths
        num_blocks = -(-num_elements // _BLOCK)
        sums = [self._block_lengths(np.arange(first, min(first + _BLOCKS_AT_ONCE, num_blocks))).sum(axis=1)
                for first in range(0, num_blocks, _BLOCKS_AT_ONCE)]
        self._blocks = np.concatenate([np.zeros(1, np.int64), *sums]).cumsum()

    @property
    def total(self) -> int:
        return int(self._blocks[-1])

    def find(self, positions: _Integers) -> tuple[_Integers, _Integers]:
        """Return for each position the element that it lies in, and the sum of all lengths before that element."""
        blocks = np.searchsorted(self._blocks, positions, side="right") - 1
        ends = self._blocks[blocks, None] + self._block_lengths(blocks).cumsum(axis=1)
        inside = (ends <= positions[:, None]).sum(axis=1)
        before = np.where(inside > 0, ends[np.arange(len(ends)), inside - 1], self._blocks[blocks])
        return blocks * _BLOCK + inside, before

    def before(self, elements: _Integers) -> _Integers:
        """Return for each element the sum of all lengths before it."""
        blocks, inside = np.divmod(elements, _BLOCK)
        counted = np.arange(_BLOCK) < inside[:, None]
        return self._blocks[blocks] + (self._block_lengths(blocks) * counted).sum(axis=1)

    def _block_lengths(self, blocks: _Integers) -> _Integers:
        """Return the lengths of the elements of blocks [n] as [n, 64]; 0 after the last element."""
        elements = blocks[:, None] * _BLOCK + np.arange(_BLOCK)
        lengths = self._lengths(np.minimum(elements, self.num_elements - 1)).astype(np.int64)
        return np.where(elements < self.num_elements, lengths, 0)
