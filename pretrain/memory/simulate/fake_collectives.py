"""Replacements for loops over all ranks in ZeRO-3 (DeepSpeed 0.19.8): one iteration that allocates the same bytes.

ZeRO-3 splits flat tensors into one view per rank before its collectives, and joins the views afterwards. On tensors
without data a view takes as long as any operator, about 0.2 ms, and 1,024 ranks mean millions of views.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.comm.coalesced_collectives import _torch_reduce_scatter_fn
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus


@contextlib.contextmanager
def shared_views() -> Iterator[None]:
    """While the context is active, let `Tensor.narrow` return one shared view per tensor, dimension and length.

    Views at other offsets would differ only in their data, which fake tensors do not have.
    """
    narrow, views = torch.Tensor.narrow, {}  # type: Any, dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]]

    def shared(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        key = (id(tensor), dim, length)
        if key not in views:
            views[key] = (tensor, narrow(tensor, dim, start, length))  # `tensor` remains alive, so its id is unique
        return views[key][1]

    setattr(torch.Tensor, "narrow", shared)  # noqa: B010 (mypy rejects an assignment)
    try:
        yield
    finally:
        delattr(torch.Tensor, "narrow")  # torch.Tensor inherits the original method


def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Replaces reduce_scatter_coalesced of runtime/comm/coalesced_collectives.py: returns this rank's parts.

    The parts are views of one flat tensor, which is padded to a multiple of the number of ranks. As in DeepSpeed, the
    padding has tensors of its own until the function returns.
    """
    ranks, rank = comm.get_world_size(group), comm.get_rank(group)
    sizes = [math.ceil(tensor.numel() / ranks) for tensor in tensors]
    total, padding = sum(sizes), sum(sizes) * ranks - sum(tensor.numel() for tensor in tensors)
    in_place = len(tensors) == 1 and padding == 0
    pads = tensors[0].new_empty(0 if in_place else padding)
    flat = tensors[0].view(-1) if in_place else tensors[0].new_empty(total * ranks)
    flat.div_(ranks)
    own = flat.narrow(0, rank * total, total)
    _torch_reduce_scatter_fn(flat, own, group=group)
    parts, offset = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        parts.append(own.narrow(0, offset, max(0, min(size, tensor.numel() - rank * size))))
        offset += size
    del pads
    return parts


def wait(self: Any, handle_dependency: bool = True) -> None:
    """Replaces AllGatherCoalescedHandle.wait: copies each complete parameter out of the gathered tensor."""
    if self.complete:
        return
    self.allgather_handle.wait()
    for param in self.params:
        gathered = self.partitions[0].new_empty(param.ds_numel)
        param.data = gathered.view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
    self.complete = True


def _sharing_views(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with shared_views():
            return function(*args, **kwargs)

    return call


def replace_loops_over_ranks() -> None:
    """Install the replacements for the whole process. Quantized all-gathers (ZeRO++) are not replaced."""
    convert, original_wait = partition_parameters.Init._convert_to_deepspeed_param, AllGatherCoalescedHandle.wait

    def convert_to_deepspeed_param(self: Any, param: Any) -> None:
        convert(self, param)
        param.all_gather_coalesced = _sharing_views(param.all_gather_coalesced)

    def wait_for(self: Any, handle_dependency: bool = True) -> None:
        (original_wait if self.quantization else wait)(self, handle_dependency)

    partition_parameters.Init._convert_to_deepspeed_param = convert_to_deepspeed_param
    AllGatherCoalescedHandle.wait = wait_for
    stage3.reduce_scatter_coalesced = reduce_scatter_coalesced
