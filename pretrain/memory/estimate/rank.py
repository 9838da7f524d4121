"""One rank of a layout, as the moments of its step see it."""

from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.memory.estimate.activations import Pass, pass_of
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.pipeline_stages import Group, rank_groups


@dataclass(frozen=True)
class Rank:
    """One rank of a layout, and what all its moments have in common."""

    shape: ModelShape
    layout: Layout
    pipeline_stage: int
    zero_rank: int

    @property
    def one(self) -> Pass:
        return pass_of(self.layout)

    @property
    def is_last(self) -> bool:
        return self.pipeline_stage == self.layout.pipeline_stages - 1

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations wait for their backward pass: 1F1B (runtime/pipe/schedule.py)."""
        return min(self.layout.pipeline_stages - self.pipeline_stage, self.layout.gradient_accumulation_steps)

    @property
    def pipe_buffers(self) -> int:
        """Slots for the inputs and outputs of micro-batches (TrainSchedule.num_pipe_buffers)."""
        return max(2, self.in_flight)

    @property
    def accumulates(self) -> bool:
        return self.layout.gradient_accumulation_steps > 1

    def groups(self) -> tuple[Group, ...]:
        return rank_groups(self.shape, self.layout, self.pipeline_stage)
