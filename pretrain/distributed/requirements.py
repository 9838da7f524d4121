"""The packages that ds-pretrain requires, as its installation records them, and a check of their versions."""

import functools
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from pretrain.errors import ConfigError


@functools.cache
def requirements() -> tuple[Requirement, ...]:
    """Return the requirements of ds-pretrain, without those of extras."""
    try:
        lines = requires("ds-pretrain") or []
    except PackageNotFoundError:  # the checkout is not installed
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
            found = version(name)
            is_older = Version(Version(found).base_version) < Version(lowest)
        except (PackageNotFoundError, InvalidVersion):
            continue
        if is_older and name != "deepspeed":
            raise ConfigError(name, found=f"version {found}", expected=f"at least {lowest}",
                              remedy=f"pip install '{requirement}'")
