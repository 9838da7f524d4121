"""The pipeline schedule ZB-H1 on DeepSpeed's pipeline engine, to measure what it gains over 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: the backward pass computes the gradient of its input
only, which the previous stage waits for. The gradients of the weights are computed later, in what would be bubble.

This is a measurement and not an option of runs. ds_configs/pipelines.md has the reasons.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.autograd.function import once_differentiable

from pretrain.model.layers.block import Block
from pretrain.model.layers.linear import Linear

_torch_linear = F.linear


class WeightGradients(schedule.PipeInstruction):
    """Instruction: compute the oldest postponed gradients, those of one micro-batch."""


class ZeroBubbleSchedule(schedule.TrainSchedule):
    """ZB-H1: the instructions of 1F1B in the same order, with WeightGradients between them.

    Stage s of S computes the weight gradients of a micro-batch s backward passes later. It postpones those of the last
    min(s, S - s) backward passes to the end. So it holds the activations of at most S micro-batches, like the first
    stage of 1F1B.
    """

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Yield lists of instructions, as TrainSchedule does."""
        kept_to_end = min(self.stage_id, self.stages - self.stage_id)
        backward_passes = postponed = 0
        for instructions in super().steps():
            extended: list[schedule.PipeInstruction] = []
            for instruction in instructions:
                if isinstance(instruction, schedule.ReduceTiedGrads):  # the first instruction that reads gradients
                    extended += [WeightGradients() for _ in range(postponed)]
                extended.append(instruction)
                if isinstance(instruction, schedule.BackwardPass):
                    backward_passes += 1
                    postponed += 1
                    if postponed > self.stage_id and self.micro_batches - backward_passes >= kept_to_end:
                        extended.append(WeightGradients())
                        postponed -= 1
            yield extended


@dataclass(frozen=True)
class PostponedProduct:
    """Inputs of the gradients of a linear layer. Shapes: N tokens, I inputs, O outputs."""

    x_NI: torch.Tensor
    grad_NO: torch.Tensor
    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None

    def add_gradients(self) -> None:
        """Add the gradients to those of the parameters."""
        _add_gradient(self.weight_OI, self.grad_NO.t() @ self.x_NI)
        if self.bias_O is not None:
            _add_gradient(self.bias_O, self.grad_NO.sum(0))


def _add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class DividedLinear(torch.autograd.Function):
    """F.linear whose backward pass computes the gradient of its input, and appends the rest to the list `postponed`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None,
                postponed: list[PostponedProduct]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.parameters, ctx.postponed = (weight_OI, bias_O), postponed
        return _torch_linear(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (weight_OI, bias_O) = ctx.saved_tensors, ctx.parameters
        grad_NO = grads[0].flatten(0, -2)
        ctx.postponed.append(PostponedProduct(x.flatten(0, -2), grad_NO, weight_OI, bias_O))
        return (grad_NO @ weight_OI).view(x.shape), None, None, None


class ZeroBubble:
    """Switches an engine between 1F1B and ZB-H1, from one step to the next.

    It divides the products of the blocks' linear layers, which must use torch's operators (--plain_operators). The
    gradients of the embedding, the norms and the loss remain in the backward pass.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine, self._on = engine, False
        self._current: list[PostponedProduct] = []  # of the backward pass that runs
        self._postponed: deque[list[PostponedProduct]] = deque()  # one list for each micro-batch, the oldest first
        self._weights = {id(layer.weight) for block in engine.module.modules() if isinstance(block, Block)
                         for layer in block.modules() if isinstance(layer, Linear)}
        self._one_f_one_b = engine._train_schedule
        self._whole_backward_pass = engine._INSTRUCTION_MAP[schedule.BackwardPass]
        engine._train_schedule = self._schedule
        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.BackwardPass: self._backward_pass,
                                   WeightGradients: self._add_weight_gradients}

    def switch(self, *, on: bool) -> None:
        """Let the next steps run ZB-H1, or 1F1B with torch's own F.linear."""
        self._on = on
        F.linear = self._linear if on else _torch_linear  # type: ignore[assignment]

    def _schedule(self) -> schedule.PipeSchedule:
        if not self._on:
            return self._one_f_one_b()
        return ZeroBubbleSchedule(micro_batches=self._engine.micro_batches, stages=self._engine.num_stages,
                                  stage_id=self._engine.stage_id)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if id(weight) not in self._weights:
            return _torch_linear(x, weight, bias)
        out: torch.Tensor = DividedLinear.apply(x, weight, bias, self._current)
        return out

    def _backward_pass(self, engine: PipelineEngine, buffer_id: int) -> None:
        self._whole_backward_pass(engine, buffer_id)
        if self._on:
            self._postponed.append(self._current.copy())
            self._current.clear()

    def _add_weight_gradients(self, engine: PipelineEngine) -> None:
        for product in self._postponed.popleft():
            product.add_gradients()
