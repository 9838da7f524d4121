"""An engine on which the checks run: losses, gradients without an update, and steps at a chosen learning rate."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, zero
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

from pretrain.active_extensions import without_model_flags
from pretrain.checkpoint.format.fragments import owned_weights
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather
from pretrain.engine.build import remove_swap_files
from pretrain.engine.checksums import checksum
from pretrain.engine.examine import norm_of_all_parts, train_without_overflow
from pretrain.engine.patches.pipeline import is_counted
from pretrain.engine.steps import eval_batch, grad_norm, loss_scale, open_loader, train_batch
from pretrain.engine.update_guard import guard_updates
from pretrain.engine.update_statistics import measure_updates

_OWN_OUTPUT = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger", "wall_clock_breakdown")


def trial_plan(plan: Plan) -> Plan:
    """Return the plan without DeepSpeed's monitors and profilers, and with swap files in a folder of their own."""
    config = deepcopy({key: value for key, value in plan.ds_config.items() if key not in _OWN_OUTPUT})
    for block in ("offload_optimizer", "offload_param"):
        offload = config.get("zero_optimization", {}).get(block) or {}
        if offload.get("nvme_path") is not None:
            offload["nvme_path"] = f"{offload['nvme_path']}/trial"
    return replace(plan, ds_config=config)


def remove_trial_files(plan: Plan) -> None:
    """Remove the swap files of `trial_plan(plan)` on this host, once all ranks have finished."""
    if os.environ["LOCAL_RANK"] == "0":
        remove_swap_files(trial_plan(plan))


def plan_of_checks(plan: Plan) -> Plan:
    """Return the plan of the engines that are checked: without some settings that act on a single pass or its gradient.

    Without dropout two forward passes can be compared. Compiled blocks would be compiled for each shape of a check. In
    FP8, small changes of the weights change nothing or too much. The gradient belongs to the reported loss only without
    label smoothing, z-loss, routers' losses and clipping of values.
    """
    args = replace(plan.args, compile_blocks=False, loss=None, extensions=without_model_flags(plan.args),
                   label_smoothing=0.0, z_loss=0.0, router_aux_loss=0.0, router_z_loss=0.0, expert_capacity_factor=0.0,
                   gradient_value_clipping=0.0, adaptive_clipping=0.0, noise_scale_interval=0)
    model = replace(plan.model, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
    return replace(plan, model=model, args=args)


@dataclass(frozen=True)
class Gradients:
    """The gradients that the optimizer would have used, unscaled and before clipping."""

    loss: float  # mean of the global batch
    norm: float  # global norm, as the engine reports it
    norms: dict[str, float]  # norms of each parameter on any rank, by name; NaN: the parameter has no gradient
    kept: dict[str, torch.Tensor]  # the gradients of the parameters of this rank that were asked for


class CheckedEngine:
    """An engine whose updates are all skipped, except in `train`.

    A skipped update leaves weights and optimizer states as they are (engine/update_guard.py).
    """

    def __init__(self, engine: DeepSpeedEngine, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        self._is_training = False
        self._before_update: Callable[[], None] = lambda: None
        self._update_size = measure_updates(engine, functools.partial(owned_weights, engine))
        guard_updates(engine, lambda loss, norm: not self._is_training)
        take_step = engine._take_model_step  # after all reductions, before the gradients are clipped

        def observed_step(*args: Any, **kwargs: Any) -> Any:
            self._before_update()
            return take_step(*args, **kwargs)

        engine._take_model_step = observed_step

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of this rank, with their names."""
        return list(self.engine.module.named_parameters())

    def batches(self, consumed_samples: int, **layout: int) -> list[MicroBatch]:
        """Return the micro-batches of the step at `consumed_samples`, with other fields of the layout if given."""
        plan = replace(self.plan, layout=replace(self.plan.layout, **layout))  # type: ignore[arg-type]
        loader = open_loader(self.engine, plan, "train")
        try:
            return loader.step(consumed_samples)
        finally:
            loader.close()

    def loss(self, batches: list[MicroBatch]) -> float:
        """Return the mean loss over the micro-batches and data-parallel ranks, in evaluation mode."""
        return float(eval_batch(self.engine, batches))

    def training_loss(self, batches: list[MicroBatch]) -> float:
        """Return the loss of a training step whose update is skipped."""
        return float(train_batch(self.engine, batches))

    def gradients(self, batches: list[MicroBatch], keep: frozenset[str] = frozenset()) -> Gradients:
        """Compute the gradients of a training step, and skip its update; collective.

        Args:
            keep: names of the parameters whose gradients are returned.
        """
        norms: dict[str, float] = {}
        kept: dict[str, torch.Tensor] = {}

        def read() -> None:
            scale = loss_scale(self.engine)
            for name, parameter in self.parameters():
                gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
                norms[name] = math.nan if gradient is None else \
                    norm_of_all_parts(self.engine, parameter, gradient) / scale
                if name in keep and gradient is not None:
                    kept[name] = gradient.detach().float() / scale

        self._before_update = read
        try:
            loss, _ = train_without_overflow(self.engine, batches)
        finally:
            self._before_update = lambda: None
        merged = {name: value for of_rank in gather(norms) for name, value in of_rank.items()}
        return Gradients(loss, grad_norm(self.engine), merged, kept)

    def train(self, batches: list[MicroBatch], lr: float) -> float:
        """Run a training step with this learning rate. Returns the loss before the update."""
        self._is_training = True
        try:
            return train_without_overflow(self.engine, batches, lr)[0]
        finally:
            self._is_training = False

    def relative_update(self, batches: list[MicroBatch], lr: float) -> float:
        """Run a training step. Returns the size of its update relative to the weights; NaN if they are on NVMe."""
        self._update_size.is_due = True
        try:
            self.train(batches, lr)
        finally:
            self._update_size.is_due = False
        squares = self._update_size.take_squares()
        dist.all_reduce(squares)
        _, changed, sampled = squares.tolist()
        return math.sqrt(changed / sampled) if sampled else math.nan

    def weights_checksum(self) -> list[int]:
        """Return a checksum of the weights of each rank."""
        sums = [int(checksum(getattr(parameter, "ds_tensor", parameter).detach().cpu().contiguous().view(-1)))
                for _, parameter in self.parameters()]
        return gather(hash(tuple(sums)))

    @contextlib.contextmanager
    def moved(self, directions: dict[str, torch.Tensor], length: float) -> Iterator[float]:
        """Add `length` times each direction to the weights of the forward pass, and undo this after the block.

        Yields the dot product of the actual change with the directions, over all ranks. It is not `length` times their
        squared norm, because 16-bit weights are rounded.
        """
        original, product = {}, 0.0
        for name, parameter in self.parameters():
            if name not in directions:
                continue
            with _whole(parameter), torch.no_grad():
                original[name] = parameter.detach().clone()
                direction = directions[name].to(parameter.device)
                parameter.copy_((parameter.float() + length * direction).to(parameter.dtype))
                if is_counted(self.engine, parameter):
                    product += float(((parameter.float() - original[name].float()) * direction).sum())
        # these ranks have the same weights and directions: the sum is over the parts of a model replica
        yield sum(gather(product)) / self.plan.layout.zero_size
        for name, parameter in self.parameters():
            if name in original:
                with _whole(parameter), torch.no_grad():
                    parameter.copy_(original[name])


def _whole(parameter: torch.nn.Parameter) -> Any:
    """Return a context in which this rank holds the complete parameter. Changes apply to all ranks."""
    if hasattr(parameter, "ds_id"):
        return zero.GatheredParameters([parameter], modifier_rank=0)
    return contextlib.nullcontext()
