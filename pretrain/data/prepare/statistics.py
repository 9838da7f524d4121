"""Counts of a prepared data set, which grow with each part and are saved with the partial output."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST_SAMPLE = 20  # documents that were skipped, of which place and reason are kept
_LENGTH_CLASSES = 32  # class k has the documents of 2^(k-1) to 2^k - 1 tokens


@dataclass
class Statistics:
    """Counts of the documents that were written, and of those that were left out."""

    token_counts: npt.NDArray[np.int64]
    """[vocab_size]"""
    text_bytes: int = 0
    """bytes of the text of the documents that were written, as UTF-8"""
    documents: int = 0
    empty: int = 0
    """documents without text, or whose text has no tokens"""
    skipped: int = 0
    skipped_samples: list[tuple[str, str]] = field(default_factory=list)
    """(place, reason) of the first ones"""
    duplicates: int = 0
    """documents whose tokens are those of an earlier one"""
    longest_tokens: int = 0
    longest_place: str = ""
    lengths: list[int] = field(default_factory=lambda: [0] * _LENGTH_CLASSES)
    """number of documents of each class"""

    @property
    def tokens(self) -> int:
        return int(self.token_counts.sum())

    def add_documents(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Add complete documents: all their tokens, the number of tokens of each, and the bytes of their text."""
        self.add_tokens(tokens)
        self.documents += len(lengths)
        self.text_bytes += text_bytes
        classes = np.frexp(lengths.astype(np.float64))[1]  # exact: lengths are below 2^31
        for index, count in enumerate(np.bincount(classes, minlength=_LENGTH_CLASSES).tolist()):
            self.lengths[index] += count

    def add_tokens(self, tokens: npt.NDArray[Any]) -> None:
        self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))

    def add_longest(self, num_tokens: int, place: str) -> None:
        """Compare a document with the longest one. Of several, the first one is kept."""
        if num_tokens > self.longest_tokens:
            self.longest_tokens, self.longest_place = num_tokens, place

    def skip(self, place: str, reason: str) -> None:
        """Count a document that is left out because it cannot be read."""
        self.skipped += 1
        if len(self.skipped_samples) < LARGEST_SAMPLE:
            self.skipped_samples.append((place, reason))

    def length_histogram(self) -> dict[str, int]:
        """Return the number of documents by length: {"1": ..., "2-3": ..., "4-7": ...}."""
        last = max((index for index, count in enumerate(self.lengths) if count), default=0)
        return {_class_name(index): count for index, count in enumerate(self.lengths[: last + 1]) if index or count}

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "token_counts": self.token_counts.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Statistics":
        """Raises TypeError, KeyError or ValueError for values that `to_json` did not make."""
        samples = [(str(place), str(reason)) for place, reason in values["skipped_samples"]]
        return cls(**{**values, "token_counts": np.array(values["token_counts"], np.int64),
                      "skipped_samples": samples})


def _class_name(index: int) -> str:
    if index < 2:
        return str(index)
    return f"{2 ** (index - 1)}-{2 ** index - 1}"


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy in nats of the frequencies `counts` [n]."""
    frequencies = counts[counts > 0] / counts.sum()
    return -math.fsum((frequencies * np.log(frequencies)).tolist())
