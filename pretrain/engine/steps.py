"""Open the loaders of an engine, run its training and evaluation steps, and read their metrics.

Only this file and build.py distinguish between PipelineModule and plain module.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from pretrain.config.plan import Plan
from pretrain.data.loader import Loader, MicroBatch
from pretrain.data.samples.read_order import DEFAULT_ORDER, ReadOrder
from pretrain.engine.attachments import attachments
from pretrain.engine.phases import BACKWARD, FORWARD, NO_TIMERS, OPTIMIZER


def open_loader(engine: DeepSpeedEngine, plan: Plan, name: str, *, is_divided: bool = True,
                order: ReadOrder | None = None) -> Loader:
    """Return the loader of the dataset `name` of the plan, such as "train" or "valid".

    Each rank reads the samples of its place in the engine's layout; if not `is_divided`, those of all ranks.
    --batch_schedule, --seq_length_schedule, and the order of the samples apply to "train" only.
    `order`: another one than the plan's.
    """
    is_training, ranks = name == "train", data_parallel_size(engine)
    return Loader(plan.datasets[name], micro_batch_size=plan.layout.micro_batch_size,
                  gradient_accumulation_steps=plan.layout.gradient_accumulation_steps * (1 if is_divided else ranks),
                  data_parallel_rank=data_parallel_rank(engine) if is_divided else 0,
                  data_parallel_size=ranks if is_divided else 1,
                  eod_token=plan.eod_token if plan.args.eod_mask_loss else None,
                  sum_over_data_parallel=partial(sum_over_data_parallel, engine) if is_divided else torch.tensor,
                  batch_size_at=plan.length.batch_sizes.at if is_training else None,
                  seq_length_at=plan.seq_lengths.at if is_training and plan.seq_lengths.stages else None,
                  document_end=plan.eod_token if plan.args.document_attention else None,
                  pin_memory=engine.device.type == "cuda",
                  order=(order or plan.read_order) if is_training else DEFAULT_ORDER)


def train_batch(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Run one optimizer step on this rank's micro-batches: forward, backward, reduction, clipping, update, schedule.

    Returns:
        Mean loss over the unmasked tokens of the global batch, before the update: a scalar on the device, on each rank.
    """
    _set_accumulation_steps(engine, len(micro_batches))
    if engine.module.router_losses is not None:
        engine.module.router_losses.scale = loss_scale(engine) / len(micro_batches)
    timers = attachments(engine).phase_timers or NO_TIMERS
    if isinstance(engine, PipelineEngine):
        _fit_buffers(engine, micro_batches)
        with timers.training_step():
            loss = engine.train_batch(_on_device(engine, micro_batches)).reshape(())
        _keep_rank_loss(engine, engine.dp_group_loss.reshape(()), micro_batches)
        return loss

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        timers.enter(FORWARD)
        loss: torch.Tensor = engine(*inputs)
        timers.enter(BACKWARD)
        engine.backward(loss)
        timers.enter(OPTIMIZER)
        engine.step()
        return loss.detach()

    engine.train()
    with timers.training_step():
        own_mean = _mean_over_micro_batches(engine, micro_batches, step)
    _keep_rank_loss(engine, own_mean, micro_batches)
    return _mean_over_data_parallel(engine, own_mean)


def _set_accumulation_steps(engine: DeepSpeedEngine, steps: int) -> None:
    """Make the engine divide gradients by this number of micro-batches, and update after it."""
    current = engine.gradient_accumulation_steps()
    if steps == current:
        return
    engine.set_train_batch_size(engine.train_batch_size() // current * steps)
    engine.tput_timer.batch_size = engine.train_batch_size()
    # DeepSpeed 0.19.8 (runtime/engine.py, is_gradient_accumulation_boundary) updates where the number of micro-batches
    # since the start is a multiple of the accumulation steps, and set_train_batch_size keeps that number. Without a
    # reset, the first step of another size would end too early or too late.
    engine.micro_steps = 0


@torch.no_grad()
def eval_batch(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Return the mean loss over the unmasked tokens of a global batch, without dropout: a scalar, on each rank."""
    if isinstance(engine, PipelineEngine):
        _fit_buffers(engine, micro_batches)
        return engine.eval_batch(_on_device(engine, micro_batches), num_micro_batches=len(micro_batches)).reshape(())
    engine.eval()
    return _mean_over_data_parallel(engine, _mean_over_micro_batches(engine, micro_batches, engine))


def _fit_buffers(engine: PipelineEngine, micro_batches: list[MicroBatch]) -> None:
    """Let the pipeline stages exchange the shape of activations again if it differs from the last step's."""
    inputs, (labels_BT, _) = micro_batches[0]
    own, shape = attachments(engine), (labels_BT.shape, not torch.is_tensor(inputs))
    if own.last_shape not in (None, shape):
        engine.reset_activation_shape()
    own.last_shape = shape


def _mean_over_micro_batches(engine: DeepSpeedEngine, micro_batches: list[MicroBatch],
                             loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the mean of `loss_of(tokens, labels, weights)` over this rank's micro-batches.

    With document attention, the positions are a fourth argument.
    """
    total = torch.zeros((), device=engine.device)
    for inputs, (labels_BT, weights_BT) in _on_device(engine, micro_batches):
        tokens_BT, *positions = (inputs,) if torch.is_tensor(inputs) else inputs
        total += loss_of(tokens_BT, labels_BT, weights_BT, *positions)
    return total / len(micro_batches)


def _mean_over_data_parallel(engine: DeepSpeedEngine, own_mean: torch.Tensor) -> torch.Tensor:
    """Return the mean over the data-parallel ranks of their means over micro-batches.

    PipelineEngine computes the same mean of the losses. Every engine computes the same mean of the gradients. The
    Loader's weights rely on this.
    """
    ranks = data_parallel_size(engine)
    if ranks == 1:
        return own_mean
    mean = own_mean.clone()
    torch.distributed.all_reduce(mean, group=engine.data_parallel_group)
    return mean / ranks


def _keep_rank_loss(engine: DeepSpeedEngine, own_mean: torch.Tensor, micro_batches: list[MicroBatch]) -> None:
    """Keep the mean loss of this data-parallel rank's own unmasked tokens; see `rank_loss`."""
    weight = torch.stack([weights_BT.sum() for _, (_, weights_BT) in micro_batches]).mean()
    attachments(engine).rank_loss = own_mean / weight.clamp(min=torch.finfo(weight.dtype).tiny)


def rank_loss(engine: DeepSpeedEngine) -> torch.Tensor:
    """Return the last step's mean loss over the unmasked tokens of this data-parallel rank: a scalar on the device.

    All pipeline stages and tensor-parallel ranks of a data-parallel rank have the same value. It is 0 if all tokens are
    masked.
    """
    loss = attachments(engine).rank_loss
    assert loss is not None  # a step has been trained
    return loss


def _on_device(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Copy each micro-batch to the engine's device when it is read.

    The copy from pinned memory does not wait for the device. In a pipeline, DeepSpeed 0.19.8 would copy to ordinary
    memory first, and from there to the device, which waits (runtime/pipe/engine.py, _exec_load_micro_batch).
    """
    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.to(device=engine.device, non_blocking=True)

    for inputs, (labels_BT, weights_BT) in micro_batches:
        moved = copy(inputs) if torch.is_tensor(inputs) else (copy(inputs[0]), copy(inputs[1]))
        yield moved, (copy(labels_BT), copy(weights_BT))


def sum_over_data_parallel(engine: DeepSpeedEngine, count: float) -> torch.Tensor:
    """Return the sum of the counts of the data-parallel ranks: a scalar on the device. Does not wait for the device."""
    dtype = torch.int64 if isinstance(count, int) else torch.float64
    total = torch.full((), count, dtype=dtype, device=engine.device)  # unlike torch.tensor, it copies nothing
    if data_parallel_size(engine) > 1:
        torch.distributed.all_reduce(total, group=engine.data_parallel_group)
    return total


def data_parallel_rank(engine: DeepSpeedEngine) -> int:
    return torch.distributed.get_rank(engine.data_parallel_group)


def data_parallel_size(engine: DeepSpeedEngine) -> int:
    return torch.distributed.get_world_size(engine.data_parallel_group)


def tensor_parallel_size(engine: DeepSpeedEngine) -> int:
    return int(bwc_tensor_model_parallel_world_size(engine.mpu))


def grad_norm(engine: DeepSpeedEngine) -> float:
    """Return the global norm of the last step's gradients before clipping, unscaled; NaN before the first step."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)


def global_grad_norm(engine: DeepSpeedEngine) -> torch.Tensor | float | None:
    """Return this norm without waiting for the device: a scalar on the device, a number, or None if there is none."""
    norm: torch.Tensor | float | None = engine.get_global_grad_norm()
    return norm


def loss_scale(engine: DeepSpeedEngine) -> float:
    """Return the current loss scale of fp16; 1 in other precisions."""
    if not engine.fp16_enabled():
        return 1.0
    scale = engine._get_optimizer_loss_scale()
    return float(scale if scale is not None else engine.optimizer.loss_scale)


def learning_rate(engine: DeepSpeedEngine) -> float:
    """Return the learning rate of the next step. Waits for the device if it decided about the last update."""
    settle(engine)
    return float(engine.get_lr()[0])


def learning_rate_of_update(engine: DeepSpeedEngine) -> float:
    """Return the learning rate of the last update, or that it would have had if it was skipped."""
    return attachments(engine).update.learning_rate


def skipped_steps(engine: DeepSpeedEngine) -> int:
    """Return the number of skipped updates. Waits for the device if it decided about the last update."""
    settle(engine)
    return int(engine.skipped_steps)


def settle(engine: DeepSpeedEngine) -> None:
    """Let the engine's counters and its schedule know whether the last update was skipped (patches/late_skip.py)."""
    late = attachments(engine).update.late
    if late is not None:
        late.settle()


def scale_at_minimum(engine: DeepSpeedEngine) -> bool:
    """Return whether fp16's loss scale cannot decrease: static, or at its minimum. False in other precisions."""
    if not engine.fp16_enabled():
        return False
    scaler = _loss_scaler(engine)
    minimum = getattr(scaler, "min_scale", None) or getattr(scaler, "min_loss_scale", None)
    return minimum is None or scaler.cur_scale <= minimum


def _loss_scaler(engine: DeepSpeedEngine) -> Any:
    return getattr(engine.optimizer, "loss_scale_config", None) or engine.optimizer.loss_scaler


def loss_scale_state(engine: DeepSpeedEngine) -> dict[str, float] | None:
    """Return fp16's loss scale and the counters of its window, under DeepSpeed's names; None in other precisions."""
    if not engine.fp16_enabled():
        return None
    scaler = _loss_scaler(engine)
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {name: float(getattr(scaler, name)) for name in names if getattr(scaler, name, None) is not None}


def random_batches(plan: Plan) -> list[MicroBatch]:
    """Return the micro-batches of one step of one rank, with random tokens. A sample is a single document."""
    shape = (plan.layout.micro_batch_size, plan.args.seq_length)

    def batch() -> MicroBatch:
        tokens_BT = torch.randint(plan.model.vocab_size, shape)
        labels = (tokens_BT.clone(), torch.full(shape, 1.0 / (shape[0] * shape[1])))
        if not plan.layout.document_attention:
            return tokens_BT, labels
        return (tokens_BT, torch.arange(shape[1]).repeat(shape[0], 1)), labels

    return [batch() for _ in range(plan.layout.gradient_accumulation_steps)]
