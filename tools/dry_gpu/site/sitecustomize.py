"""Python imports this module first in each process of dry-gpu. It replaces what only kernels can compute.

Sizes of messages and the routes of tokens are values, and kernels compute nothing here: torch's object collectives go
over gloo, and experts get tokens that the host deals out in turn. Programs reject a GPU that does not compute; here
they print a note, but with DRY_GPU_CHECKED=1 they do what they do on a broken GPU. All else is what runs on a GPU.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
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

    to_slots = experts.to_slots
    experts.plan_exchange = plan_exchange
    experts.to_slots = lambda x_RI, rows_E, size: to_slots(x_RI, rows_E, int(rows_E.cpu().max()))


def _accept_a_gpu_that_computes_nothing(own_gpu: Any) -> None:
    original = own_gpu.require_computing

    def require_computing(index: int) -> None:
        try:
            original(index)
        except own_gpu.DeviceError:
            if os.environ.get("DRY_GPU_CHECKED"):
                raise
            if index == 0:
                print("note: a dry GPU computes nothing: losses and norms are 0", file=sys.stderr, flush=True)

    own_gpu.require_computing = require_computing


def _count_generated_tokens(utils: Any) -> None:
    class Criteria(utils.StoppingCriteriaList):
        is_full = False

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            Criteria.is_full = input_ids.shape[1] >= self.max_length
            return super().__call__(input_ids, scores, **kwargs)

    def has_unfinished_sequences(*_: Any, **__: Any) -> bool:
        is_full, Criteria.is_full = Criteria.is_full, False
        return not is_full

    utils.StoppingCriteriaList = Criteria
    utils.GenerationMixin._has_unfinished_sequences = has_unfinished_sequences


def _count_waits(step_loop: Any) -> None:
    runpy.run_path(f"{os.path.dirname(__file__)}/../waits.py")["watch"](step_loop)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "torch.distributed.distributed_c10d": _send_objects_over_gloo,
    "pretrain.distributed.own_gpu": _accept_a_gpu_that_computes_nothing,
    "pretrain.model.layers.moe": _deal_tokens_to_experts,
    "pretrain.model.layers.experts": _count_rows_on_the_host,
    "transformers.generation.utils": _count_generated_tokens,
}
if "DRY_GPU_WAITS" in os.environ:
    _PATCHES["pretrain.step_loop"] = _count_waits
sys.meta_path.insert(0, _PatchWhenImported())


def _record_lines(folder: str) -> None:
    """Write each line of pretrain/ that this process executes to a file, once, at once: ranks end by os._exit."""
    os.makedirs(folder, exist_ok=True)
    file = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in seen:
            seen.add(place)
            os.write(file, f"pretrain/{place[0].rpartition('/pretrain/')[2]}:{place[1]}\n".encode())
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line(frame, event, None) if "/pretrain/" in frame.f_code.co_filename else None

    sys.settrace(call)
    threading.settrace(call)


if os.environ.get("DRY_GPU_LINES"):
    _record_lines(os.environ["DRY_GPU_LINES"])
