"""Python imports this module first in each process of dry-gpu. It replaces what only kernels can compute.

Sizes of messages and the routes of tokens are values, and kernels compute nothing here: torch's object collectives go
over gloo, and experts get tokens that the host deals out in turn. All else is what runs on a GPU.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_POSITION_OF_GROUP = {"broadcast_object_list": 2, "all_gather_object": 2, "gather_object": 3}


class _PatchWhenImported(importlib.abc.MetaPathFinder):
    """Patches the modules of `_PATCHES` after they have run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        patch = _PATCHES.pop(name, None)
        spec = None if patch is None else importlib.machinery.PathFinder.find_spec(name, path)
        if patch is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            patch(module)

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


def _deal_tokens_to_experts(moe: Any) -> None:
    original = moe.plan_dispatch

    def plan_dispatch(routing: Any, *, capacity: int = 0) -> Any:
        import torch

        num_experts, device = routing.probs_NE.shape[1], routing.experts_NK.device
        experts = torch.arange(routing.experts_NK.numel()) % num_experts
        on_host = dataclasses.replace(routing, probs_NE=torch.full(routing.probs_NE.shape, 1 / num_experts),
                                      experts_NK=experts.view(routing.experts_NK.shape))
        dispatch = original(on_host, capacity=capacity)
        tensors = {field.name: getattr(dispatch, field.name) for field in dataclasses.fields(dispatch)}
        return dataclasses.replace(dispatch, **{name: value.to(device) for name, value in tensors.items()
                                                if isinstance(value, torch.Tensor)})

    moe.plan_dispatch = plan_dispatch


def _count_rows_on_the_host(experts: Any) -> None:
    from pretrain.model.parallel.token_exchange import Exchange

    def plan_exchange(counts_E: Any, group: Any) -> Any:
        import torch
        import torch.distributed as dist

        received = torch.empty_like(counts_E)
        dist.all_to_all_single(received, counts_E, group=group.handle)
        sent_RL, received_RL = counts_E.cpu().view(group.size, -1), received.cpu().view(group.size, -1)
        experts_L = torch.arange(sent_RL.shape[1])
        order = torch.repeat_interleave(experts_L.repeat(group.size), received_RL.reshape(-1)).argsort(stable=True)
        return Exchange(group, sent_RL.sum(1).tolist(), received_RL.sum(1).tolist(), order.to(counts_E.device),
                        received_RL.sum(0).to(counts_E.device))

    experts.plan_exchange = plan_exchange


def _count_waits(step_loop: Any) -> None:
    runpy.run_path(f"{os.path.dirname(__file__)}/../waits.py")["watch"](step_loop)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "torch.distributed.distributed_c10d": _send_objects_over_gloo,
    "pretrain.model.layers.moe": _deal_tokens_to_experts,
    "pretrain.model.layers.experts": _count_rows_on_the_host,
}
if "DRY_GPU_WAITS" in os.environ:
    _PATCHES["pretrain.step_loop"] = _count_waits
sys.meta_path.insert(0, _PatchWhenImported())
