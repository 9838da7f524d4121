"""Save host time per step, which small models feel: passes over parameters in Python, sums over one rank, and waits.

DeepSpeed 0.19.8 makes the passes in each step, at any size of the model. None of these functions changes a value.
Guarded by tests/extensions/host_time/test_updates.py, which compares the steps with those of DeepSpeed bit by bit.

Streams of a GPU wait for each other where DeepSpeed lets the host wait. It waits in each step in these places, whose
results do not need the host:

    runtime/utils.py:887-888                    a constant is copied to the device, and read from there again
    runtime/zero/stage3.py:2483                 a constant is copied to the device
    runtime/zero/stage3.py:1414                 at the end of a backward pass, for the stream that reduces gradients
    runtime/zero/partition_parameters.py        84, 114, 1951, 2128: for parameters that were gathered or divided
    runtime/zero/stage_1_and_2.py:1028, 2413    with overlap_comm, for the whole device
    runtime/pipe/engine.py:628                  the other pipeline stages copy zeros to the device, to receive the loss
    utils/timer.py:238, 256                     twice for each micro-batch, for the whole device, to measure a speed

The order of the work remains: a stream waits for what was launched before on the other one. With offload, the host
needs the gradients, and waits for the streams. In two places ZeRO-3 lets the host wait for an event, so that it is at
most two reductions (stage3.py:1667) or gathers (partitioned_param_coordinator.py:404) ahead: this bounds the memory,
and remains. A dry GPU cannot show it, because its events are complete at once.

Waits are guarded by tests/extensions/host_time/test_waits.py, which counts them, and by tests/gpu/test_runs.py.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.distributed.requirements import shortcut
from pretrain.engine.attachments import attachments
from pretrain.engine.patches.skip import replaced
from pretrain.engine.update import Update
from pretrain.extensions.host_time.reads import read_less


def wait_on_device(engine: DeepSpeedEngine, update: Update) -> None:
    """Apply the functions of this file that fit the engine."""
    partition_parameters.get_accelerator = get_accelerator  # an earlier engine of this process has another stream
    for work_around in (_measure_no_speed, _receive_losses, _fill_constants, _order_reductions, _order_partitions,
                        _order_gathers):
        with shortcut("no waits of the host"):
            work_around(engine, update)


def _mask(norm: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace a norm that is not finite, as DeepSpeed's function, which copies the value to the device."""
    norm.masked_fill_(~norm.isfinite(), val)


class _With:
    """A module or an accelerator with some functions replaced."""

    def __init__(self, original: Any, **functions: Callable[..., Any]) -> None:
        self._original = original
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _accelerator(**functions: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function like DeepSpeed's get_accelerator."""
    found = _With(get_accelerator(), **functions)
    return lambda: found


def _replace_within(owner: Any, names: Iterable[str], module: Any, **functions: Any) -> None:
    """Replace functions of `module`, which defines the methods `names` of the owner, within these methods."""
    def within(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, **functions):
                return method(*args, **kwargs)

        return call

    for name in functions:
        getattr(module, name)  # raises AttributeError now, and not in a step
    for name in names:
        setattr(owner, name, within(getattr(owner, name)))


def _measure_no_speed(engine: DeepSpeedEngine, update: Update) -> None:
    """Let DeepSpeed's timer of the throughput not wait, unless the JSON has settings for it."""
    if "timers" not in engine.config:
        engine.tput_timer.config.synchronized = False


def _receive_losses(engine: DeepSpeedEngine, update: Update) -> None:
    """Let pipeline stages fill the buffer for the losses on the device."""
    if isinstance(engine, PipelineEngine):
        _replace_within(engine, ("_aggregate_total_loss",), pipe_engine, torch=_With(
            torch, Tensor=lambda zeros: torch.zeros(len(zeros), device=engine.device)))


def _fill_constants(engine: DeepSpeedEngine, update: Update) -> None:
    """Let ZeRO write the -1 of norms that are not finite on the device."""
    def tensor(value: float, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.full((), value, dtype=dtype, device=device)

    optimizer, name = engine.optimizer, ("get_grad_norm_direct",)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        _replace_within(optimizer, name, stage_1_and_2, mask_nan_or_inf_with_val_inplace=_mask)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _replace_within(optimizer, name, stage3, torch=_With(torch, tensor=tensor))
        _replace_within(optimizer, ("complete_grad_norm_calculation_for_cpu_offload",), stage3,
                        mask_nan_or_inf_with_val_inplace=_mask)


def _order_reductions(engine: DeepSpeedEngine, update: Update) -> None:
    """Let ZeRO-1 and 2 with overlap_comm order the stream of reductions and the default one on the device.

    Gradients whose memory is released after this may be used again on the default stream only.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not _on_cuda(engine) or not optimizer.overlap_comm \
            or optimizer.cpu_offload:
        return

    def order() -> None:
        default, reductions = get_accelerator().default_stream(), optimizer.reduction_stream
        default.wait_stream(reductions)
        reductions.wait_stream(default)

    names = ("independent_gradient_partition_epilogue", "allreduce_and_copy",
             "_allreduce_noncontiguous_bucket_preserving_fp32")
    _replace_within(optimizer, filter(partial(hasattr, optimizer), names), stage_1_and_2,
                    get_accelerator=_accelerator(synchronize=order))


def _order_partitions(engine: DeepSpeedEngine, update: Update) -> None:
    """Let the default stream of ZeRO-3 wait for reduced gradients at the end of a backward pass."""
    optimizer = engine.optimizer
    if not _keeps_all_on_cuda(engine):
        return

    def order() -> bool:
        get_accelerator().current_stream().wait_stream(optimizer.reduce_and_partition_stream)
        return True

    _replace_within(optimizer, ("independent_gradient_partition_epilogue",), stage3,
                    get_accelerator=_accelerator(resolves_data_dependency=order))


def _order_gathers(engine: DeepSpeedEngine, update: Update) -> None:
    """Let the stream on which ZeRO-3 gathers parameters wait for the current one, which has changed them.

    Each place of partition_parameters.py asks whether the accelerator resolves dependencies, and otherwise waits.
    Without parameters that remain gathered, DeepSpeed does not wait after an update, and the next gather could read
    parameters that the default stream still writes.
    """
    if not _keeps_all_on_cuda(engine):
        return
    gathers, original = engine.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream, update.step

    def order() -> bool:
        gathers.wait_stream(get_accelerator().current_stream())
        return True

    def step(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        order()

    partition_parameters.get_accelerator = _accelerator(resolves_data_dependency=order)
    update.step = step


def _on_cuda(engine: DeepSpeedEngine) -> bool:
    kind: str = engine.device.type
    return kind == "cuda"


def _keeps_all_on_cuda(engine: DeepSpeedEngine) -> bool:
    """Return whether ZeRO-3 keeps parameters and optimizer on the GPU."""
    optimizer = engine.optimizer
    return _on_cuda(engine) and isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) \
        and not optimizer.offload_optimizer and not optimizer.offload_param


def patch_engine(engine: DeepSpeedEngine) -> None:
    """Apply the functions of this folder that fit the engine."""
    save_host_time(engine)
    update = attachments(engine).update
    with shortcut("fewer reads from the device"):
        read_less(engine, update)
    wait_on_device(engine, update)


def save_host_time(engine: DeepSpeedEngine) -> None:
    """Apply the functions of this file that fit the engine."""
    with shortcut("sums over one rank"):
        _skip_sums_over_one_rank()
    for save in (_keep_mode, _clear_known_gradients, _keep_places, _skip_reduction_at_stage_0, _add_gradients_at_once):
        with shortcut("host time per step"):
            save(engine)


def _skip_sums_over_one_rank() -> None:
    """Skip the all-reduces of DeepSpeed whose group has one rank.

    DeepSpeed 0.19.8 makes them for norms and flags (runtime/utils.py, runtime/zero/stage_1_and_2.py, stage3.py). gloo
    hands each one to another thread, which takes half a millisecond; NCCL launches a kernel. There is one backend for
    all engines of a process.
    """
    backend: Any = comm.cdb
    if "all_reduce" in vars(backend):
        return
    reduce = backend.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = comm.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return reduce(tensor, op, group, async_op)
        return None

    backend.all_reduce = all_reduce


def _keep_mode(engine: DeepSpeedEngine) -> None:
    """Set the mode of all modules only if it changes: `train` visits each of them in every step (pipe/engine.py)."""
    module = engine.module
    if not isinstance(module, torch.nn.Module):
        return
    set_mode = module.train

    def train(mode: bool = True) -> torch.nn.Module:
        return module if module.training == mode else set_mode(mode)

    setattr(module, "train", train)  # noqa: B010  mypy: a method


def _clear_known_gradients(engine: DeepSpeedEngine) -> None:
    """Let `zero_grad` (runtime/engine.py) walk over a list of the parameters instead of all modules."""
    if engine.zero_optimization():
        return
    parameters = [*engine.module.parameters()]

    def zero_grad() -> None:
        for parameter in parameters:
            parameter.grad = None

    engine.zero_grad = zero_grad


def _keep_places(engine: DeepSpeedEngine) -> None:
    """Let ZeRO-1 and ZeRO-2 place the parameters in their flat buffer only if one of them is elsewhere.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, step) makes them views of it after each update, "just to be safe".
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    place = optimizer._update_model_bit16_weights
    placed: dict[int, list[int]] = {}  # addresses of a group's buffer and parameters

    def update_model_bit16_weights(group: int) -> None:
        def addresses() -> list[int]:
            return [x.data_ptr() for x in (optimizer.bit16_groups_flat[group], *optimizer.bit16_groups[group])]

        if placed.get(group) != addresses():
            place(group)
            placed[group] = addresses()

    optimizer._update_model_bit16_weights = update_model_bit16_weights


def _skip_reduction_at_stage_0(engine: DeepSpeedEngine) -> None:
    """Keep the gradients where they are, if one data-parallel rank would reduce them at ZeRO stage 0.

    DeepSpeed 0.19.8 (runtime/engine.py, buffered_allreduce_fallback, allreduce_bucket) concatenates the gradients,
    divides them by 1, and copies them back. It also rounds them to communication_data_type: that of BF16_Optimizer's
    fp32 gradients is bf16, which changes sums of several micro-batches.
    """
    reduce, optimizer = engine.buffered_allreduce_fallback, engine.optimizer
    if not isinstance(engine, PipelineEngine) or engine.zero_optimization() or engine.has_moe_layers \
            or engine.gradient_predivide_factor() != 1 \
            or dist.get_world_size(engine.mpu.get_data_parallel_group()) > 1:
        return
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    dtypes = {parameter.dtype for parameter in parameters}
    keeps_own = hasattr(optimizer, "get_grads_for_reduction")  # BF16_Optimizer: fp32 sums of gradients in bf16

    def buffered_allreduce_fallback(grads: Any = None, elements_per_buffer: int = 0) -> None:
        if dtypes != {engine.communication_data_type} or (keeps_own and engine.gradient_accumulation_steps() > 1):
            reduce(grads, elements_per_buffer)
            return
        for parameter in () if keeps_own else parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    engine.buffered_allreduce_fallback = buffered_allreduce_fallback


def _add_gradients_at_once(engine: DeepSpeedEngine) -> None:
    """Add all gradients to BF16_Optimizer's sums by one operator.

    DeepSpeed 0.19.8 (runtime/bf16_optimizer.py, _update_hp_grad) calls several for each of them, and if the sums are in
    fp32, makes a copy first.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer) or getattr(optimizer, "autoep_folding_tp_group", None) is not None:
        return
    add = optimizer.update_hp_grads
    parameters = [(parameter, total, group, index) for group, members in enumerate(optimizer.bf16_groups)
                  for index, (parameter, total) in enumerate(
                      zip(members, optimizer.fp32_groups_gradients[group], strict=True))]

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        if optimizer.immediate_grad_update or clear_lp_grads:
            add(clear_lp_grads)
            return
        totals, gradients = [], []
        for parameter, total, group, index in parameters:
            if parameter.grad is not None:
                totals.append(total)
                gradients.append(parameter.grad.view(total.shape))
                parameter._hp_grad = total
                optimizer.fp32_groups_has_gradients[group][index] = True
        if totals:
            torch._foreach_add_(totals, gradients)

    optimizer.update_hp_grads = update_hp_grads
