"""Python imports this module first in each process of dry-gpu: object collectives go over gloo.

torch computes the sizes of their messages with kernels, which compute nothing here. All other collectives are those of
the stand-in for NCCL.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_POSITION_OF_GROUP = {"broadcast_object_list": 2, "all_gather_object": 2, "gather_object": 3}


class _PatchWhenImported(importlib.abc.MetaPathFinder):
    """Finds torch.distributed.distributed_c10d once, and patches it after it has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            _send_objects_over_gloo(module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def _send_objects_over_gloo(c10d: Any) -> None:
    groups: dict[tuple[int, ...], Any] = {}

    def gloo_group(group: Any) -> Any:
        ranks = tuple(c10d.get_process_group_ranks(group or c10d.group.WORLD))
        if ranks not in groups:
            groups[ranks] = c10d.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return groups[ranks]

    def over_gloo(original: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = args[position] if len(args) > position else kwargs.get("group")
            kwargs["group"] = gloo_group(group)
            kwargs.pop("device", None)
            return original(*args[:position], **kwargs)

        return call

    for name, position in _POSITION_OF_GROUP.items():
        setattr(c10d, name, over_gloo(getattr(c10d, name), position))


sys.meta_path.insert(0, _PatchWhenImported())
