"""Samples as a pure function of (tokens, seed, index), independent of ranks, batch sizes and workers.

A range of tokens is divided into windows of seq_length + 1 tokens that overlap by one token. Each epoch starts the
first window at another token and visits the windows in another order. The order is not stored: it is a keyed
permutation that is computed on demand.
"""

import hashlib
import itertools
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.indexed import IndexedDataset
from pretrain.errors import ConfigError

_SPLITS = ("train", "valid", "test")
_FEISTEL_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """Hash 64 bits to 64 bits with the finalizer of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Return the image of `index` under a keyed permutation of range(size): a Feistel network with O(1) memory.

    The network permutes range(4^k) with 4^k >= size. It is applied until the result lies in range(size).
    """
    assert 0 <= index < size
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(key ^ _mix(right * _FEISTEL_ROUNDS + number)) & mask)
        index = left << half | right
        if index < size:
            return index


class SampleDataset:
    """Windows of seq_length + 1 tokens from the tokens [first_token, last_token) of a `.bin/.idx` pair.

    Raises ConfigError if the range is shorter than one window.
    """

    def __init__(self, indexed: IndexedDataset, *, seq_length: int, seed: int, first_token: int = 0,
                 last_token: int | None = None, name: str = "train") -> None:
        self.indexed, self.seq_length, self.seed, self.name = indexed, seq_length, seed, name
        self.first_token = first_token
        self.last_token = indexed.num_tokens if last_token is None else last_token
        if self.num_tokens < seq_length + 1:
            raise ConfigError(f"{indexed.prefix} ({name})", found=f"{self.num_tokens} tokens",
                              expected=f"at least {seq_length + 1} for one sample of --seq_length {seq_length}",
                              remedy="give more data, a larger proportion in --split, or a smaller --seq_length")
        # One window fewer than would fit, so that each epoch has at least seq_length choices for its first token.
        self.samples_per_epoch = max(self.num_tokens // seq_length - 1, 1)

    @property
    def num_tokens(self) -> int:
        return self.last_token - self.first_token

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return sample `index` (over all epochs) as int64 [seq_length + 1]."""
        start = self.sample_start(index)
        return self.indexed.tokens(start, start + self.seq_length + 1)

    def sample_start(self, index: int) -> int:
        """Return the position of the first token of sample `index` in the flat stream."""
        assert index >= 0
        epoch, position = divmod(index, self.samples_per_epoch)
        key = _mix(_mix(self.seed & _MASK_64) ^ epoch)
        spare = self.num_tokens - 1 - self.samples_per_epoch * self.seq_length
        shift = _mix(key) % (spare + 1)
        return self.first_token + shift + permute(position, self.samples_per_epoch, key) * self.seq_length

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of data, token range and seq_length. These and the seed determine the samples."""
        content = f"{self.indexed.fingerprint} {self.first_token} {self.last_token} {self.seq_length}"
        return hashlib.sha256(content.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint.

        `sha256` covers every byte of the data; None: not known yet. In that case, size and modification time of the
        .bin identify it.
        """
        status, hashes = self.indexed.file.status(), self.indexed.hashes
        is_known = hashes is not None and hashes.describes(status, self.indexed.idx_sha256)
        return {"sha256": hashes.sha256 if hashes is not None and is_known else None, "bin_bytes": status.st_size,
                "bin_mtime_ns": status.st_mtime_ns, "first_token": self.first_token, "last_token": self.last_token}


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse "969,30,1" into fractions that sum to 1; missing ones are 0. Raises ConfigError."""
    expected = "up to three proportions TRAIN,VALID,TEST, the first above 0, such as 969,30,1"
    try:
        proportions = [float(word) for word in split.split(",")]
    except ValueError:
        raise ConfigError("--split", found=repr(split), expected=expected) from None
    if len(proportions) > 3 or not all(0 <= proportion <= 1e9 for proportion in proportions) or proportions[0] < 1e-9:
        raise ConfigError("--split", found=repr(split), expected=expected)
    proportions += [0.0] * (3 - len(proportions))
    return proportions[0] / sum(proportions), proportions[1] / sum(proportions), proportions[2] / sum(proportions)


def split_documents(num_documents: int, fractions: tuple[float, float, float]) -> list[tuple[int, int]]:
    """Return [first, last) documents of train, valid and test: consecutive, rounded as in Megatron-LM and GPT-NeoX."""
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + round(fraction * num_documents))
    surplus = bounds[-1] - num_documents
    bounds = [0] + [max(bound - surplus, 0) for bound in bounds[1:]]
    return list(itertools.pairwise(bounds))


def open_datasets(train_data: str, *, valid_data: str | None = None, test_data: str | None = None, split: str,
                  seq_length: int, seed: int) -> dict[str, SampleDataset]:
    """Open the datasets of a run: "train", and "valid" and "test" if there are documents for them.

    `split` divides the documents of `train_data`. A dataset with its own pair gets no documents of `train_data`. Raises
    ConfigError for a missing or damaged pair, a bad --split, and a range of documents too short for one sample.
    """
    if not train_data:
        raise ConfigError("--train_data", problem="it is required: the prefix of a .bin/.idx pair",
                          remedy="tools/prepare_data.py writes one")
    own = {"valid": valid_data, "test": test_data}
    weights = [0.0 if own.get(name) else fraction for name, fraction in zip(_SPLITS, parse_split(split), strict=True)]
    train, valid, test = (weight / sum(weights) for weight in weights)
    indexed = IndexedDataset(train_data)
    ranges = split_documents(indexed.num_documents, (train, valid, test))
    # By default 1 of 1000 documents is for the test set. In a small corpus this is too little for a test set.
    fewest_tokens = {"train": 0, "valid": 1, "test": seq_length + 1}
    datasets: dict[str, SampleDataset] = {}
    for name, (first, last) in zip(_SPLITS, ranges, strict=True):
        prefix = own.get(name)
        source = IndexedDataset(prefix) if prefix else indexed
        start, stop = (0, source.num_tokens) if prefix else indexed.document_offsets[[first, last]].tolist()
        if prefix or stop - start >= fewest_tokens[name]:
            datasets[name] = SampleDataset(source, seq_length=seq_length, seed=seed, first_token=start,
                                           last_token=stop, name=name)
    return datasets
