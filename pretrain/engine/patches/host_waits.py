"""Let streams of a GPU wait for each other where DeepSpeed lets the host wait.

DeepSpeed 0.19.8 waits in each step in these places, whose results do not need the host:

    runtime/utils.py:887-888 (ZeRO-1 and 2)     a constant is copied to the device, and read from there again
    runtime/zero/stage3.py:2483                 a constant is copied to the device
    runtime/zero/stage3.py:1414                 at the end of a backward pass, for the stream that reduces gradients
    runtime/zero/partition_parameters.py        84, 114, 1951, 2128: for parameters that were gathered or divided
    runtime/zero/stage_1_and_2.py:1028, 2413    with overlap_comm, for the whole device
    utils/timer.py:238, 256                     twice for each micro-batch, for the whole device, to measure a speed

The last step of each order remains: a stream waits for the work that was launched before on the other one. With
offload, the host needs the results, and all waits remain. These waits bound the memory of ZeRO-3, and remain, too: for
the event before the last two reductions (stage3.py:1667) or gathers (partitioned_param_coordinator.py:404), which is
complete unless the host is ahead.

Guarded by tests/dry_gpu/test_waits.py, which counts them, and by tests/gpu/test_runs.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.distributed.deepspeed_version import shortcut
from pretrain.engine.patches.skip import replaced
from pretrain.engine.update import Update


def wait_on_device(engine: DeepSpeedEngine, update: Update) -> None:
    """Apply the functions of this file that fit the engine."""
    optimizer = engine.optimizer
    with shortcut("no waits of the host"):
        partition_parameters.get_accelerator = get_accelerator  # an earlier engine of this process has another stream
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            update.step = _mask_on_device(update.step)
        on_cuda = engine.device.type == "cuda"
        if on_cuda and "timers" not in engine.config:
            engine.tput_timer.config.synchronized = False
        if isinstance(optimizer, DeepSpeedZeroOptimizer) and on_cuda and optimizer.overlap_comm \
                and not optimizer.cpu_offload:
            _order_reductions(optimizer)
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not optimizer.offload_optimizer \
                and not optimizer.offload_param:
            _fill_constant(optimizer)
            if on_cuda:
                _order_gathers(optimizer, update)
                _order_partitions(optimizer)


def _mask_on_device(update: Callable[..., Any]) -> Callable[..., None]:
    """Return `update`, the step of ZeRO-1 and 2, which replaces a norm that is not finite without a copy of -1."""
    def mask(norm: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
        norm.masked_fill_(~norm.isfinite(), val)

    def step(*args: Any, **kwargs: Any) -> None:
        with replaced(stage_1_and_2, mask_nan_or_inf_with_val_inplace=mask):
            update(*args, **kwargs)

    return step


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


def _replace_within(optimizer: Any, names: Iterable[str], module: Any, **functions: Any) -> None:
    """Replace names of `module`, which defines the methods `names` of the optimizer, within these methods."""
    def within(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, **functions):
                return method(*args, **kwargs)

        return call

    for name in names:
        setattr(optimizer, name, within(getattr(optimizer, name)))


def _fill_constant(optimizer: Any) -> None:
    """Let `get_grad_norm_direct` of ZeRO-3 fill a scalar on the device with its -1, which it copies there."""
    def tensor(value: float, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.full((), value, dtype=dtype, device=device)

    _replace_within(optimizer, ("get_grad_norm_direct",), stage3, torch=_With(torch, tensor=tensor))


def _order_reductions(optimizer: Any) -> None:
    """Let ZeRO-1 and 2 with overlap_comm order the stream of reductions and the default one on the device.

    Gradients whose memory is released after this may be used again on the default stream only.
    """
    def order() -> None:
        default, reductions = get_accelerator().default_stream(), optimizer.reduction_stream
        default.wait_stream(reductions)
        reductions.wait_stream(default)

    _replace_within(optimizer, ("independent_gradient_partition_epilogue", "allreduce_and_copy",
                                "_allreduce_noncontiguous_bucket_preserving_fp32"), stage_1_and_2,
                    get_accelerator=_accelerator(synchronize=order))


def _order_partitions(optimizer: Any) -> None:
    """Let the default stream of ZeRO-3 wait for reduced gradients at the end of a backward pass."""
    def order() -> bool:
        get_accelerator().current_stream().wait_stream(optimizer.reduce_and_partition_stream)
        return True

    _replace_within(optimizer, ("independent_gradient_partition_epilogue",), stage3,
                    get_accelerator=_accelerator(resolves_data_dependency=order))


def _order_gathers(optimizer: Any, update: Update) -> None:
    """Let the stream on which ZeRO-3 gathers parameters wait for the current one, which has changed them.

    Each place of partition_parameters.py asks whether the accelerator resolves dependencies, and otherwise waits.
    Without parameters that remain gathered, DeepSpeed does not wait after an update, and the next gather could read
    parameters that the default stream still writes.
    """
    gathers, original = optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream, update.step

    def order() -> bool:
        gathers.wait_stream(get_accelerator().current_stream())
        return True

    def step(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        order()

    partition_parameters.get_accelerator = _accelerator(resolves_data_dependency=order)
    update.step = step
