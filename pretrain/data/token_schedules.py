"""Settings that change at numbers of consumed tokens: the global batch size and the sequence length.

Both are written as FROM_TOKENS:VALUE,... and depend only on the number of consumed samples. So the order of the samples
does not depend on them, and a resume or a rollback finds the same values at the same data positions.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from pretrain.errors import ConfigError

BATCH_SCHEDULE = "--batch_schedule"
_LENGTH_SCHEDULE = "--seq_length_schedule"
_EXPECTED = {
    BATCH_SCHEDULE: "FROM_TOKENS:GLOBAL_BATCH,..., such as 0:64,1e9:128: from this number of consumed tokens on, this "
                    "batch",
    _LENGTH_SCHEDULE: "FROM_TOKENS:LENGTH,..., such as 0:256,1000000000:1024: from this number of consumed tokens on, "
                      "this length",
}
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
Stages = tuple[tuple[int, int], ...]
"""(first sample, value) of each stage, in ascending order; the first begins at 0"""


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size, in samples, at each data position of a run (arXiv 2005.14165, appendix B)."""

    stages: Stages  # the global batch sizes rise

    @property
    def final(self) -> int:
        """Largest batch size: the last ramp-up stage has it."""
        return self.stages[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Return the batch size of the step that begins at this sample."""
        return next(size for first, size in reversed(self.stages) if first <= consumed_samples)

    def ending_at(self, consumed_samples: int) -> int:
        """Return the batch size of the step after which this many samples are consumed.

        There is only one such step: where the sizes rise, a larger step would begin earlier, in an earlier stage. If no
        step ends here, return the size at the sample before.
        """
        sizes = [size for _, size in self.stages
                 if size <= consumed_samples and self.at(consumed_samples - size) == size]
        return sizes[0] if sizes else self.at(max(consumed_samples - 1, 0))

    def samples_after(self, steps: int, *, first_sample: int = 0) -> int:
        """Return the data position after this number of steps from `first_sample`."""
        consumed = first_sample
        for consumed, size, length in self._phases(first_sample):
            if length is None or steps <= length:
                return consumed + steps * size
            steps -= length
        return consumed

    def steps_until(self, position: int, *, first_sample: int = 0) -> int:
        """Return the number of steps from `first_sample` after which at least `position` is reached."""
        steps = 0
        for consumed, size, length in self._phases(first_sample):
            needed = max(-(-(position - consumed) // size), 0)
            if length is None or needed <= length:
                return steps + needed
            steps += length
        return steps

    def _phases(self, first_sample: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (data position at its start, batch size, number of steps; None for the last) of each stage reached."""
        consumed = first_sample
        for (_, size), (end, _) in itertools.pairwise(self.stages):
            if consumed < end:
                length = -(-(end - consumed) // size)
                yield consumed, size, length
                consumed += length * size
        yield consumed, self.final, None


def fixed_batch(size: int) -> BatchSizes:
    """Return the batch sizes of a run without --batch_schedule."""
    return BatchSizes(((0, size),))


def recorded_batch_sizes(start: Mapping[str, Any]) -> BatchSizes:
    """Return the batch sizes of a start in run.json. Raises KeyError, TypeError or ValueError if it is damaged."""
    flags = start.get("flags", {})
    if flags.get("batch_schedule") is None:
        return fixed_batch(int(start["batch"]["global_batch_size"]))
    return parse_batch_sizes(flags["batch_schedule"], seq_length=flags["seq_length"])


def parse_batch_sizes(text: str, *, seq_length: int) -> BatchSizes:
    """Parse --batch_schedule. Raises ConfigError."""
    stages = _parse_stages(BATCH_SCHEDULE, text, seq_length=seq_length)
    if stages[0][1] < 1 or any(after <= before for (_, before), (_, after) in itertools.pairwise(stages)):
        raise ConfigError(BATCH_SCHEDULE, found=text, expected="global batches of at least 1 sample that rise")
    return BatchSizes(stages)


@dataclass(frozen=True)
class SeqLengths:
    """The sequence length at each position of a run: a curriculum that begins with short ones (arXiv 2108.06084).

    A sample always has --seq_length tokens. While the length is smaller, each sample is divided into several sequences.
    So no token is lost, and each step has the same number of tokens.
    """

    sample_length: int  # tokens in a sample
    stages: Stages = ()  # empty: the length is always `sample_length`

    def at(self, consumed_samples: int) -> int:
        """Return the length of the sequences of the step that begins at this sample."""
        reached = [length for first, length in self.stages if first <= consumed_samples]
        return reached[-1] if reached else self.sample_length


def parse_seq_lengths(text: str | None, *, seq_length: int) -> SeqLengths:
    """Parse --seq_length_schedule. Raises ConfigError."""
    if text is None:
        return SeqLengths(seq_length)
    stages = _parse_stages(_LENGTH_SCHEDULE, text, seq_length=seq_length)
    wrong = [size for _, size in stages if size < 1 or seq_length % size]
    if wrong:
        raise ConfigError(_LENGTH_SCHEDULE, found=f"length {wrong[0]}",
                          expected=f"a divisor of --seq_length, {seq_length}")
    return SeqLengths(seq_length, stages)


def _parse_stages(flag: str, text: str, *, seq_length: int) -> Stages:
    """Parse FROM_TOKENS:VALUE,... Raises ConfigError.

    The numbers of tokens rise from 0. A stage begins with the first step at whose beginning its number of tokens is
    consumed.
    """
    stages: list[tuple[int, int]] = []
    for word in text.split(","):
        tokens, _, number = word.partition(":")
        begin, value = parse_token_count(tokens), parse_whole_number(number)
        if begin is None or value is None:
            raise ConfigError(flag, found=repr(word), expected=_EXPECTED[flag])
        stages.append((begin, value))
    if stages[0][0] != 0 or any(after <= before for (before, _), (after, _) in itertools.pairwise(stages)):
        raise ConfigError(flag, found=text, expected="numbers of tokens that rise from 0")
    return tuple((-(-begin // seq_length), value) for begin, value in stages)


def parse_token_count(text: str) -> int | None:
    """Return a number of tokens, which may be written as 1e9 or 2.5B; None if it is not a whole number from 0 on.

    K, M, B and T are 10^3, 10^6, 10^9 and 10^12, in either case.
    """
    text = text.strip()
    return parse_whole_number(text[:-1], unit=_UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else \
        parse_whole_number(text)


def parse_whole_number(text: str, *, unit: int = 1) -> int | None:
    """Return the number times `unit`. It may be written as 1e3. None if the product is not a whole number from 0 on."""
    try:
        value = Decimal(text) * unit
        return int(value) if 0 <= value < 2**63 and value == int(value) else None
    except (InvalidOperation, ValueError, OverflowError):  # Decimal compares no NaN, and int() takes no infinity
        return None
