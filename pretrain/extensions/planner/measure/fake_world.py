"""Simulation of one rank in this process: a fake process group, and fake tensors without data.

It replaces functions of torch and DeepSpeed 0.19.8 for the whole process. simulate_ranks.py lists them, with reasons.

Loops over all ranks in ZeRO-3 are replaced by one iteration that allocates the same bytes. ZeRO-3 splits flat tensors
into one view per rank before its collectives, and joins the views afterwards. On tensors without data a view takes as
long as any operator, about 0.2 ms, and 1,024 ranks mean millions of views.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder
from deepspeed.runtime.comm.coalesced_collectives import _torch_reduce_scatter_fn
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from pretrain.config.plan import Plan
from pretrain.config.validate import check_settings
from pretrain.distributed.device import cpu_device
from pretrain.distributed.process_group import skip_shared_memory_operator
from pretrain.engine import build
from pretrain.engine.build import build_engine, deepspeed_output
from pretrain.extensions.planner.measure.observe_steps import observe_steps
from pretrain.extensions.planner.measure.simulate_ranks import SimulatedRank, SimulationRequest
from pretrain.extensions.planner.measure.tensor_inventory import role_of_file
from pretrain.memory.footprint import Footprint
from pretrain.memory.storage_tracker import StorageTracker
from pretrain.model.operators import all_kernels
from pretrain.model.parameters import DTYPES

_STEPS = 2


class FakeStorageTracker(StorageTracker):
    """A StorageTracker that also gives fake tensors a value when the host reads it: 1 for a float, 0 for others."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor) \
                and args[0].constant is None:
            return 1.0 if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


class FakeAioHandle:
    """Replaces DeepSpeed's `aio_handle`: records the sizes of the files that would be written."""

    file_sizes: ClassVar[dict[str, int]] = {}  # bytes by path
    page_locked: ClassVar[set[int]] = set()  # identities of storages

    def __init__(self, **_: Any) -> None:
        self.pending = 0

    def new_cpu_locked_tensor(self, numel: int, example: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(int(numel), dtype=example.dtype)
        FakeAioHandle.page_locked.add(tensor.untyped_storage()._cdata)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in FakeAioHandle.page_locked

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self.pending += 1
        return 0

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        FakeAioHandle.file_sizes[path] = tensor.numel() * tensor.element_size()
        self.pending += 1
        return 0

    def wait(self) -> int:
        done, self.pending = self.pending, 0
        return done


class FakeOperators:
    """Replaces a compiled module of DeepSpeed: it has `aio_handle`, and every other function does nothing."""

    aio_handle = FakeAioHandle

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Initialize a process group whose collectives do nothing, and make this process its rank `rank`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1",
                      CROSS_RANK=str(rank), CROSS_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    skip_shared_memory_operator()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def apply_to_fake_tensors(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """Replaces `torch.nn.Module._apply`, for parameters without gradients.

    torch's `_apply` swaps the fake tensors, which fails for a tensor that has weak references.
    """
    with torch.no_grad():
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = fn(parameter.data)
            module._buffers.update({name: None if buffer is None else fn(buffer)
                                    for name, buffer in module._buffers.items()})
    return self


def gather_own_value(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Replaces `torch.distributed.all_gather_object`: pretends that every rank has this rank's object."""
    object_list[:] = [obj] * len(object_list)


def replace_functions_that_need_data() -> None:
    """Replace compiled operators, collectives of Python objects, and checks that all ranks have the same values."""
    setattr(torch.nn.Module, "_apply", apply_to_fake_tensors)  # noqa: B010 (mypy rejects an assignment)
    def load(self: Any, verbose: bool = True) -> FakeOperators:
        return FakeOperators()

    for name in dir(op_builder):
        builder = getattr(op_builder, name)
        if isinstance(builder, type) and hasattr(builder, "load"):
            builder.load = load
    get_accelerator().create_op_builder("CPUAdamBuilder").__class__.load = load
    setattr(dist, "all_gather_object", gather_own_value)  # noqa: B010 (mypy rejects an assignment)
    for module in (partition_parameters, deepspeed.runtime.zero.utils, deepspeed.runtime.zero.stage3):
        for name, function in (("get_lst_from_rank0", lambda lst: lst),
                               ("assert_lst_len_same_as_other_ranks", lambda lst: None),
                               ("assert_ints_same_as_other_ranks", lambda lst: None)):
            if hasattr(module, name):
                setattr(module, name, function)


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


def fewer_micro_batches(plan: Plan) -> Plan:
    """Return a plan without the micro-batches that do not change the memory of a step.

    The plan keeps one micro-batch more than there are pipeline stages, and at least two, so that gradients are
    accumulated. It has no more micro-batches than the given plan.
    """
    steps = min(plan.layout.gradient_accumulation_steps, max(2, plan.layout.pipeline_stages + 1))
    batch = steps * plan.layout.micro_batch_size * plan.layout.data_parallel_size
    sizes = {"gradient_accumulation_steps": steps, "train_batch_size": batch}
    return replace(plan, layout=replace(plan.layout, gradient_accumulation_steps=steps),
                   ds_config={**plan.ds_config, **sizes})


def assume_hidden_states(engine: PipelineEngine, plan: Plan) -> None:
    """Replace `_recv_tensor_meta`: the shape of a pipeline stage's input is known, so it need not be received."""
    shape = [plan.layout.micro_batch_size, plan.args.seq_length, plan.model.hidden_size]
    dtype = DTYPES[plan.layout.precision]
    engine._recv_tensor_meta = lambda stage: engine._allocate_or_extend_buffers(0, shape, dtype)


def simulate_rank(request: SimulationRequest) -> SimulatedRank:
    """Simulate one rank. Raises ConfigError."""
    plan = check_settings(request.args, world_size=request.world_size, device=cpu_device())
    plan = fewer_micro_batches(replace(plan, layout=replace(plan.layout, layer_times=request.layer_times)))
    replace_functions_that_need_data()
    replace_loops_over_ranks()
    with deepspeed_output("error"):
        init_fake_process_group(request.rank, request.world_size)
        for kernels in all_kernels():
            kernels.simulate(FakeTensor)
        build.choose_operators = lambda plan: None
        with FakeTensorMode(allow_non_fake_inputs=True), FakeStorageTracker() as tracker:
            engine = build_engine(plan)
            if isinstance(engine, PipelineEngine):
                assume_hidden_states(engine, plan)
            memory = observe_steps(engine, plan, steps=_STEPS, tracker=tracker)
    files = Footprint.of(((role_of_file(Path(path)), "nvme"), size) for path, size in FakeAioHandle.file_sizes.items())
    return SimulatedRank(replace(memory, held=memory.held + files), tuple(plan.notes))
