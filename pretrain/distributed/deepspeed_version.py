"""Version of the installed DeepSpeed, read without importing it, and the versions that this package is tested with."""

import functools
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

from pretrain.errors import ConfigError

TESTED = ("0.18.9", "0.19.8")  # the oldest and the newest


@functools.cache
def deepspeed_version() -> Version:
    """Return the installed version. Raises ConfigError if there is none."""
    try:
        return Version(version("deepspeed"))
    except (PackageNotFoundError, InvalidVersion) as error:
        raise ConfigError("deepspeed", problem=f"it is not installed in this environment ({error})",
                          remedy=f"pip install deepspeed=={TESTED[-1]}") from None


def untested_version() -> str | None:
    """Return a line of warning if the installed version is outside the tested range; None within it."""
    found = deepspeed_version()
    if Version(TESTED[0]) <= Version(found.base_version) <= Version(TESTED[-1]):
        return None
    return (f"DeepSpeed {found} is outside the tested versions, {TESTED[0]} to {TESTED[-1]}: its defects and keys may "
            "differ. Run `ds-pretrain doctor --deepspeed`, which tests this version for the known defects")
