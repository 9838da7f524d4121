"""The samples that a run reads at its data positions, if it leaves some out or reads some in another order.

A sample has an id: its place in the order of the dataset, from 0 on, over all epochs. Without --skip_samples and
--reorder_samples, the data position p (consumed samples) reads the sample with id p. Otherwise the id is a pure
function of p and these two flags: not of ranks, batch sizes, workers or resumes.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.shuffled import permute
from pretrain.errors import ConfigError, shorten

SKIP, REORDER = "--skip_samples", "--reorder_samples"
_MOST_REORDERED = 2**24  # samples; their tables have 16 bytes for each
_LARGEST_ID = 2**48
_Numbers = npt.NDArray[np.int64]
Range = tuple[int, int]  # [first, last)


@dataclass(frozen=True)
class ReadOrder:
    """Ids of the samples at data positions.

    The places of the dataset's order are visited one after the other. In a range of `reordered` the place q has another
    sample of the range than q. Places with a sample of `skipped` are passed over.
    """

    skipped: tuple[Range, ...] = ()  # ids that are left out: ranges that rise and have gaps between them
    reordered: tuple[tuple[int, int, int], ...] = ()  # (first, last, seed): ranges that rise and do not overlap

    def ids(self, positions: Sequence[int] | _Numbers) -> _Numbers:
        """Return the ids of the samples at these data positions, int64 [n]."""
        return self._samples_at(self._places(np.asarray(positions, np.int64)))

    def end_of(self, consumed_samples: int) -> int:
        """Return the place after those that the first `consumed_samples` data positions read or passed over."""
        return int(self._places(np.array([consumed_samples - 1]))[0]) + 1 if consumed_samples else 0

    def is_same_before(self, other: "ReadOrder", consumed_samples: int) -> bool:
        """Return whether both orders read the same samples at the first `consumed_samples` data positions."""
        end = self.end_of(consumed_samples)
        return self._before(end) == other._before(end)

    def _before(self, end: int) -> list[Any]:
        starts, stops = self._skipped_places
        skipped = [(start, min(stop, end)) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
                   if start < end]
        return [skipped, [row for row in self.reordered if row[0] < end]]

    def _places(self, positions: _Numbers) -> _Numbers:
        """Return the places of data positions: as many more as places were passed over before."""
        starts, stops = self._skipped_places
        passed = np.concatenate([[0], np.cumsum(stops - starts)])
        return positions + passed[np.searchsorted(starts - passed[:-1], positions, side="right")]

    def _samples_at(self, places: _Numbers) -> _Numbers:
        ids = places.copy()
        for (first, last, _), (samples, _) in zip(self.reordered, self._tables, strict=True):
            inside = (places >= first) & (places < last)
            ids[inside] = first + samples[places[inside] - first]
        return ids

    @cached_property
    def _tables(self) -> list[tuple[_Numbers, _Numbers]]:
        """For each reordered range: the sample of each place, and the place of each sample, relative to the first."""
        tables = []
        for first, last, seed in self.reordered:
            key = int.from_bytes(hashlib.sha256(f"reorder {first} {last} {seed}".encode()).digest()[:8], "little")
            samples = permute(np.arange(last - first), last - first, np.full(last - first, key, np.uint64))
            tables.append((samples, np.argsort(samples)))
        return tables

    @cached_property
    def _skipped_places(self) -> tuple[_Numbers, _Numbers]:
        """First place, and place after the last one, of the ranges of places that are passed over, in rising order."""
        ranges = list(self.skipped)
        for (first, last, _), (_, places) in zip(self.reordered, self._tables, strict=True):
            moved = [place for start, stop in ranges if start < last and stop > first
                     for place in (first + places[max(start, first) - first:min(stop, last) - first]).tolist()]
            ranges = [part for start, stop in ranges for part in ((start, min(stop, first)), (max(start, last), stop))
                      if part[0] < part[1]]
            ranges = _merged([*ranges, *((place, place + 1) for place in moved)])
        bounds = np.array(ranges, np.int64).reshape(-1, 2)
        return bounds[:, 0], bounds[:, 1]


DEFAULT_ORDER = ReadOrder()


@lru_cache(maxsize=16)
def read_order(skip_samples: str | None, reorder_samples: str | None, first_sample: int = 0) -> ReadOrder:
    """Parse --skip_samples and --reorder_samples. Raises ConfigError; also for samples before --first_sample."""
    skipped = [(first, last) for first, last, _ in _parse(SKIP, skip_samples, "41200 or 51000:51016", single=True)]
    reordered = sorted(_parse(REORDER, reorder_samples, "41200:51000, or 41200:51000:7 with another seed"))
    for before, after in itertools.pairwise(reordered):
        if after[0] < before[1]:
            raise ConfigError(REORDER, problem=f"the ranges {before[0]}:{before[1]} and {after[0]}:{after[1]} overlap",
                              remedy="give ranges that have no sample in common")
    if sum(last - first for first, last, _ in reordered) > _MOST_REORDERED:
        raise ConfigError(REORDER, found=shorten(reorder_samples or ""), expected=f"at most {_MOST_REORDERED:,} "
                          "samples in all")
    for flag, ranges in ((SKIP, skipped), (REORDER, reordered)):
        first = min((row[0] for row in ranges), default=first_sample)
        if first < first_sample:
            raise ConfigError(flag, problem=f"sample {first} comes before --first_sample {first_sample}, with which "
                              "the run begins", remedy="give samples that the run reads")
    return ReadOrder(tuple(_merged(skipped)), tuple(reordered))


def recorded_read_order(flags: dict[str, Any]) -> ReadOrder:
    """Return the order of a run from the flags in its run.json, or from the recipe of a manifest."""
    values = [flags.get(name) for name in ("skip_samples", "reorder_samples")]
    if not all(isinstance(value, (str, type(None))) for value in values):
        raise ConfigError(SKIP, problem="its value, or that of --reorder_samples, in the record of the run is damaged")
    return read_order(*values)


def _parse(flag: str, text: str | None, example: str, *, single: bool = False) -> list[tuple[int, int, int]]:
    """Parse FIRST:LAST[:SEED],... With `single`, a number alone is a range of one, and there is no seed."""
    ranges: list[tuple[int, int, int]] = []
    for word in text.split(",") if text is not None else ():
        numbers = [_number(part) for part in word.strip().split(":")]
        if single and len(numbers) == 1 and numbers[0] is not None:
            numbers.append(numbers[0] + 1)
        if None in numbers or len(numbers) not in ((2,) if single else (2, 3)):
            raise ConfigError(flag, found=repr(shorten(word)), expected=f"{example}; the last number is the first "
                              "sample that does not belong to the range")
        first, last, seed = (*(number for number in numbers if number is not None), 0)[:3]
        if not first < last <= _LARGEST_ID:
            raise ConfigError(flag, found=repr(shorten(word)), expected="a first sample below the last one, which is "
                              f"at most {_LARGEST_ID}")
        ranges.append((first, last, seed))
    return ranges


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """Return the union of ranges as ranges that rise and have gaps between them."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def ranges_text(ids: Sequence[int] | _Numbers) -> str:
    """Return ids as a value of --skip_samples, such as 41200,51000:51016."""
    merged = _merged([(int(number), int(number) + 1) for number in ids])
    return ",".join(str(first) if last == first + 1 else f"{first}:{last}" for first, last in merged)
