"""Sequence lengths of a run: a curriculum that begins with short sequences (arXiv 2108.06084).

A sample always has --seq_length tokens. While the length is smaller, each sample is divided into several sequences. So
no token is lost, each step has the same number of tokens, and the position in the data does not depend on the lengths.
"""

from dataclasses import dataclass

from pretrain.data.datasets.token_stages import from_samples, parse_stages
from pretrain.errors import ConfigError

_FLAG = "--seq_length_schedule"
_EXPECTED = "FROM_TOKENS:LENGTH,..., such as 0:256,1000000000:1024: from this number of consumed tokens on, this length"


@dataclass(frozen=True)
class SeqLengths:
    """The sequence length at each position of a run. Without stages, it is always `sample_length`."""

    sample_length: int  # tokens in a sample
    stages: tuple[tuple[int, int], ...] = ()  # (first sample, length), in ascending order; the first begins at 0

    def at(self, consumed_samples: int) -> int:
        """Return the length of the sequences of the step that begins at this sample."""
        reached = [length for first, length in self.stages if first <= consumed_samples]
        return reached[-1] if reached else self.sample_length


def parse_seq_lengths(text: str | None, *, seq_length: int) -> SeqLengths:
    """Parse --seq_length_schedule. Raises ConfigError.

    A stage begins with the first step at whose beginning its number of tokens is consumed.
    """
    if text is None:
        return SeqLengths(seq_length)
    stages = parse_stages(_FLAG, text, expected=_EXPECTED)
    wrong = [size for _, size in stages if size < 1 or seq_length % size]
    if wrong:
        raise ConfigError(_FLAG, found=f"length {wrong[0]}", expected=f"a divisor of --seq_length, {seq_length}")
    return SeqLengths(seq_length, from_samples(stages, seq_length=seq_length))
