"""Train with a DeepSpeed of another version, of which this package does not find some names.

    hidden_names.py VERSION MODULE:CLASS.NAME,MODULE:NAME,... FLAGS OF THE RUN

DeepSpeed itself finds all names: the one that reads a name must be in a file of this package.
"""

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any


def hide(place: str) -> None:
    """Make the package see no attribute of this name."""
    module_name, _, dotted = place.partition(":")
    module = importlib.import_module(module_name)
    owner_name, _, name = dotted.rpartition(".")
    if owner_name:
        owner = getattr(module, owner_name)
        setattr(owner, name, Hidden(name, vars(owner).get(name)))
    else:
        module.__class__ = type("Hiding", (ModuleType,), {"__getattribute__": _getattribute_without(name)})


class Hidden:
    """An attribute of a class, which instances may set, that only DeepSpeed finds."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __get__(self, instance: Any, owner: type) -> Any:
        if _asked_by_package(2):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        if instance is not None and self._name in vars(instance):
            return vars(instance)[self._name]
        return self._value.__get__(instance, owner) if hasattr(self._value, "__get__") else self._value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value


def _getattribute_without(name: str) -> Any:
    def getattribute(module: ModuleType, asked: str) -> Any:
        if asked == name and _asked_by_package(2):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return ModuleType.__getattribute__(module, asked)

    return getattribute


def _asked_by_package(depth: int) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__")).startswith("pretrain.")


if __name__ == "__main__":
    version, places = sys.argv[1:3]
    del sys.argv[1:3]
    installed = importlib.metadata.version
    importlib.metadata.version = lambda package: version if package == "deepspeed" else installed(package)

    from pretrain.distributed.requirements import deepspeed_version
    from pretrain.train import main

    deepspeed_version.cache_clear()

    for place in filter(None, places.split(",")):
        hide(place)
    sys.exit(main(sys.argv[1:]))
