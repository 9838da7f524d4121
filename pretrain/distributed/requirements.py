"""The packages that ds-pretrain requires, a check of their versions, and the tested versions of DeepSpeed.

Where a name is missing in the installed DeepSpeed, `shortcut` and `workarounds` say what happens.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from pretrain.errors import ConfigError

TESTED = ("0.18.9", "0.19.8")  # the oldest and the newest
INSTALL = f"pip install deepspeed=={TESTED[-1]}"  # remedy for another version
EXPERTS_SINCE = "0.19.4"  # before, DeepSpeed has no expert parallelism
# before, the norm at ZeRO-3 counts experts once for each tensor-parallel rank (runtime/zero/stage3.py)
TENSOR_EXPERTS_AT_ZERO_3_SINCE = "0.19.8"
NVME_SINCE = "0.19.4"  # ranks of 0.19.0 abort in swaps, and resumes differ
_CHANGED_NAME = (AttributeError, ImportError, KeyError, TypeError)  # a name or a signature is another one


@functools.cache
def requirements() -> tuple[Requirement, ...]:
    """Return the requirements of ds-pretrain, without those of extras."""
    try:
        lines = metadata.requires("ds-pretrain") or []
    except metadata.PackageNotFoundError:  # the checkout is not installed
        lines = ["torch", "deepspeed", "transformers", "numpy"]
    return tuple(each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate({"extra": ""}))


@functools.cache  # versions are read from files, which takes a millisecond each
def check_requirements() -> None:
    """Raise ConfigError for an installed package that is older than its lowest version.

    Newer versions are accepted. So is each DeepSpeed (`untested_version` warns), and a pre-release of the lowest
    version, such as the 2.6.0a0 of an image by NVIDIA. A missing package is an error where it is imported.
    """
    for requirement in requirements():
        name = requirement.name
        lowest = next((each.version for each in requirement.specifier if each.operator == ">="), "0")
        try:
            found = metadata.version(name)
            is_older = Version(Version(found).base_version) < Version(lowest)
        except (metadata.PackageNotFoundError, InvalidVersion):
            continue
        if is_older and name != "deepspeed":
            raise ConfigError(name, found=f"version {found}", expected=f"at least {lowest}",
                              remedy=f"pip install '{requirement}'")


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
