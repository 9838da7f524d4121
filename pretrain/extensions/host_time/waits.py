"""Let streams of a GPU wait for each other where DeepSpeed lets the host wait.

DeepSpeed 0.19.8 waits in each step in these places, whose results do not need the host:

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

Guarded by tests/extensions/host_time/test_waits.py, which counts them, and by tests/gpu/test_runs.py.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.distributed.requirements import shortcut
from pretrain.engine.patches.skip import replaced
from pretrain.engine.update import Update


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
