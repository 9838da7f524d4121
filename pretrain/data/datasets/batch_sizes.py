"""Global batch sizes of a run: a ramp-up that begins with small batches (arXiv 2005.14165, appendix B).

The batch size of a step depends only on the number of consumed samples. So the order of the samples does not depend on
the batch sizes, and a resume or a rollback finds the same batch sizes at the same data positions.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.data.datasets.token_stages import from_samples, parse_stages
from pretrain.errors import ConfigError

FLAG = "--batch_schedule"
_EXPECTED = "FROM_TOKENS:GLOBAL_BATCH,..., such as 0:64,1e9:128: from this number of consumed tokens on, this batch"


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size, in samples, at each data position of a run."""

    stages: tuple[tuple[int, int], ...]  # (first sample, global batch size), both ascending; the first begins at 0

    @property
    def final(self) -> int:
        """Largest batch size, that of the last ramp-up stage."""
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
    """Parse --batch_schedule. Raises ConfigError.

    A stage begins with the first step at whose beginning its number of tokens is consumed.
    """
    stages = parse_stages(FLAG, text, expected=_EXPECTED)
    if stages[0][1] < 1 or any(after <= before for (_, before), (_, after) in itertools.pairwise(stages)):
        raise ConfigError(FLAG, found=text, expected="global batches of at least 1 sample that rise")
    return BatchSizes(from_samples(stages, seq_length=seq_length))
