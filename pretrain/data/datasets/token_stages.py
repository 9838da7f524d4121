"""Stages of a run that begin at numbers of consumed tokens: FROM_TOKENS:VALUE,..."""

import itertools

from pretrain.data.datasets.token_count import parse_token_count, parse_whole_number
from pretrain.errors import ConfigError


def parse_stages(flag: str, text: str, *, expected: str) -> list[tuple[int, int]]:
    """Return (number of tokens, value) of each stage. Both may be written as 1e9. Raises ConfigError.

    The numbers of tokens rise from 0. `expected` describes the flag's value.
    """
    stages: list[tuple[int, int]] = []
    for word in text.split(","):
        tokens, _, number = word.partition(":")
        begin, value = parse_token_count(tokens), parse_whole_number(number)
        if begin is None or value is None:
            raise ConfigError(flag, found=repr(word), expected=expected)
        stages.append((begin, value))
    if stages[0][0] != 0 or any(after <= before for (before, _), (after, _) in itertools.pairwise(stages)):
        raise ConfigError(flag, found=text, expected="numbers of tokens that rise from 0")
    return stages


def from_samples(stages: list[tuple[int, int]], *, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return (first sample, value) of each stage: the first sample after its number of tokens."""
    return tuple((-(-begin // seq_length), value) for begin, value in stages)
