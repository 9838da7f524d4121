"""Run DeepSpeed's launcher for one host without the import of torch and DeepSpeed.

    python pretrain/cluster/without_torch.py deepspeed.launcher.launch FLAGS OF THE LAUNCHER

The launcher only starts the ranks and waits for them, but with `python -m` DeepSpeed 0.19.8 imports torch and all of
DeepSpeed first: 1.3 s before the ranks start, and 0.3 GB of memory until they end. Here the launcher gets small
substitutes for the names that it imports (launcher/launch.py). A launcher that needs other names, such as that of
0.18.9, imports all of DeepSpeed as usual. Guarded by tests/cluster/test_without_torch.py.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_LAUNCHER = "deepspeed.launcher.launch"


class _Accelerator:
    """The two methods that the launcher calls; they are the same for CUDA and CPUs (DeepSpeed 0.19.8)."""

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int | str]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))


def _package(name: str, folders: list[str], **names: Any) -> ModuleType:
    """Enter a package with the given names into sys.modules, whose submodules can be imported from its folders."""
    package = ModuleType(name)
    package.__path__ = folders
    vars(package).update(names)
    sys.modules[name] = package
    return package


def _substitute_packages() -> None:
    """Replace `deepspeed`, `deepspeed.accelerator` and `deepspeed.utils`, which import torch."""
    found = importlib.util.find_spec("deepspeed")  # does not import it
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("deepspeed is not installed")
    folders = list(found.submodule_search_locations)
    logger = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] "
                                           "%(message)s"))  # DeepSpeed's format (utils/logging.py)
    logger.addHandler(handler)
    _package("deepspeed", folders)
    _package("deepspeed.accelerator", [], get_accelerator=_Accelerator)
    utils = _package("deepspeed.utils", [f"{folder}/utils" for folder in folders], logger=logger,
                     set_log_level_from_string=lambda level: logger.setLevel(level.upper()))
    from deepspeed.utils.numa import get_numactl_cmd

    utils.get_numactl_cmd = get_numactl_cmd  # type: ignore[attr-defined]


def _forget_substitutes() -> None:
    """Make the next import of DeepSpeed a complete one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    logging.getLogger("DeepSpeed").handlers.clear()


def _method_of_deepspeed(_: _Accelerator, name: str) -> Any:
    """Return a method of DeepSpeed's accelerator, which imports torch."""
    _forget_substitutes()
    return getattr(importlib.import_module("deepspeed.accelerator").get_accelerator(), name)


def _launcher() -> Callable[[], None]:
    """Import the launcher with the substitutes, or with all of DeepSpeed if it needs more."""
    try:
        _substitute_packages()
        launcher = importlib.import_module(_LAUNCHER)
        setattr(_Accelerator, "__getattr__", _method_of_deepspeed)  # noqa: B010 (mypy rejects an assignment)
    except (AttributeError, ImportError, TypeError):
        _forget_substitutes()
        launcher = importlib.import_module(_LAUNCHER)
    sys.argv[0] = str(launcher.__file__)
    main: Callable[[], None] = launcher.main
    return main


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH puts no folder first
        del sys.path[0]  # this folder: its modules must shadow no others
    if sys.argv[1:2] != [_LAUNCHER]:
        raise SystemExit(f"expected the module {_LAUNCHER}")
    del sys.argv[0]
    _launcher()()
