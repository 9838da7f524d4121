"""Values of --profile_steps, --pipeline_timeline and --profile_ranks."""

import re
from dataclasses import dataclass

from pretrain.errors import ConfigError

DEFAULT_PROFILE_STEPS = 3  # of a profile of a running job
MOST_STEPS = 100  # a trace of a large model has some MB per step


@dataclass(frozen=True)
class ProfileSteps:
    """Steps of one profile; both numbers are included."""

    first: int
    last: int


def parse_steps(text: str, *, flag: str = "--profile_steps") -> ProfileSteps:
    """Parse `FIRST:LAST`, or the number of a single step. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text)
    if match is None:
        raise ConfigError(flag, found=text, expected="the first and the last step, such as 10:12")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise ConfigError(flag, found=text, expected="a first step from 1, and a last step not before it")
    if last - first >= MOST_STEPS:
        raise ConfigError(flag, found=f"{last - first + 1} steps", expected=f"at most {MOST_STEPS}",
                          remedy="a trace of more steps is too large for the viewers")
    return ProfileSteps(first, last)


def parse_ranks(text: str, world_size: int) -> frozenset[int]:
    """Parse `all`, or numbers of ranks with commas between them. Raises ConfigError."""
    if text == "all":
        return frozenset(range(world_size))
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise ConfigError("--profile_ranks", found=text, expected="all, or numbers of ranks such as 0,8")
    ranks = frozenset(int(word) for word in text.split(","))
    if max(ranks) >= world_size:
        raise ConfigError("--profile_ranks", found=max(ranks), expected=f"a rank from 0 to {world_size - 1}")
    return ranks
