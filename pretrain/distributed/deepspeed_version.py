"""The installed DeepSpeed: its version, which versions are tested, and what happens where a name is missing in it."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from importlib import metadata

from packaging.version import InvalidVersion, Version

from pretrain.errors import ConfigError

TESTED = ("0.18.9", "0.19.8")  # the oldest and the newest
INSTALL = f"pip install deepspeed=={TESTED[-1]}"  # remedy for another version
EXPERTS_SINCE = "0.19.4"  # before, DeepSpeed has no expert parallelism
# before, the norm at ZeRO-3 counts experts once for each tensor-parallel rank (runtime/zero/stage3.py)
TENSOR_EXPERTS_AT_ZERO_3_SINCE = "0.19.8"
NVME_SINCE = "0.19.4"  # with 0.19.0, ranks abort in swaps, and resumes differ
_CHANGED_NAME = (AttributeError, ImportError, KeyError, TypeError)  # a name or a signature is another one


@functools.cache
def deepspeed_version() -> Version:
    """Return the installed version, without importing DeepSpeed. Raises ConfigError if there is none."""
    try:
        return Version(metadata.version("deepspeed"))
    except (metadata.PackageNotFoundError, InvalidVersion) as error:
        raise ConfigError("deepspeed", problem=f"it is not installed in this environment ({error})",
                          remedy=INSTALL) from None


def is_at_least(release: str) -> bool:
    """Return whether the installed version is this release or a later one."""
    return Version(deepspeed_version().base_version) >= Version(release)


def untested_version() -> str | None:
    """Return a line of warning if the installed version is later than the tested ones; None within their range.

    Raises ConfigError for an earlier one. 0.18.0 was tried: ZeRO-2 with gradient accumulation has other gradients.
    """
    found = deepspeed_version()
    if not is_at_least(TESTED[0]):
        raise ConfigError(f"deepspeed {found}", problem=f"versions before {TESTED[0]} can give wrong gradients here",
                          remedy=INSTALL)
    if Version(found.base_version) <= Version(TESTED[-1]):
        return None
    return (f"DeepSpeed {found} is outside the tested versions, {TESTED[0]} to {TESTED[-1]}: its defects and keys may "
            "differ. In a checkout, `python -m tests.upstream.reproduce` tests this version for the known defects")


@contextlib.contextmanager
def shortcut(name: str) -> Iterator[None]:
    """Let DeepSpeed do its own work if this version has no place for a shortcut. The block saves time or memory only.

    The block reads all names of DeepSpeed before it changes anything.
    """
    try:
        yield
    except _CHANGED_NAME as error:
        level = logging.WARNING if str(deepspeed_version()) == TESTED[-1] else logging.DEBUG
        logging.getLogger(__name__).log(level, "no shortcut in DeepSpeed %s: %s (%s)", deepspeed_version(), name, error)


@contextlib.contextmanager
def workarounds() -> Iterator[None]:
    """Reject a run on an untested version that has no place for a work-around: it could have a wrong result."""
    try:
        yield
    except _CHANGED_NAME as error:
        if untested_version() is None:
            raise
        raise ConfigError(f"deepspeed {deepspeed_version()}", problem="a work-around for its defects cannot be applied "
                          f"to this version ({error})", remedy=INSTALL) from None
