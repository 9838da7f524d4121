"""Divide the documents of a data set into training, validation and test documents."""

import itertools
from collections.abc import Sequence

from pretrain.errors import ConfigError


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


def split_documents(num_documents: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Return [first, last) documents of each part, such as train, valid and test: consecutive.

    The numbers are rounded as in Megatron-LM and GPT-NeoX.
    """
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + round(fraction * num_documents))
    surplus = bounds[-1] - num_documents
    bounds = [0] + [max(bound - surplus, 0) for bound in bounds[1:]]
    return list(itertools.pairwise(bounds))


def split_as_megatron_core(num_sequences: int, fractions: tuple[float, float, float]) -> list[tuple[int, int]]:
    """Return [first, last) sequences of train, valid and test as current Megatron-LM does: it rounds each bound."""
    bounds = [round(bound * num_sequences) for bound in itertools.accumulate(fractions, initial=0.0)]
    return list(itertools.pairwise(bounds))
