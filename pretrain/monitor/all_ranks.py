"""Values of a row that all ranks contribute to."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.engine.phases import BACKWARD, FORWARD, PHASES, WAIT
from pretrain.engine.steps import rank_loss


class HighestLoss:
    """Highest mean loss of this data-parallel rank over the steps since the last row, kept on the device."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._start = self._highest = torch.full((), -torch.inf, device=engine.device)

    def observe(self) -> None:
        """Add the step that the engine has just trained. Does not wait for the device. NaN remains NaN."""
        self._highest = torch.maximum(self._highest, rank_loss(self._engine).float())

    def take(self) -> torch.Tensor:
        """Return the value, and restart. Does not wait for the device."""
        highest, self._highest = self._highest, self._start
        return highest


@dataclass(frozen=True)
class AllRanks:
    """Values of all ranks, for a row."""

    loss_max: float
    data_seconds: float  # in each step, on the rank that waited longest for its data
    phase_ms: dict[str, float]  # in each step, mean over the ranks
    pipeline_ms: float  # from the start of a step to the end of its last backward pass, on the slowest rank
    power_watts: float | None  # mean over the ranks' devices; None if no rank can read it
    param_norm: float  # NaN if it was not measured
    update_ratio: float

    @property
    def pipeline_bubble(self) -> float | None:
        """Fraction of the forward and backward pass in which a pipeline stage computes nothing: mean over the ranks."""
        busy = self.phase_ms[FORWARD] + self.phase_ms[BACKWARD]
        return 1 - busy / self.pipeline_ms if self.pipeline_ms > 0 else None


def combine_ranks(loss_max: torch.Tensor, *, data_seconds: float, phase_ms: dict[str, float],
                  power_watts: float | None, squares: torch.Tensor) -> AllRanks:
    """Return the values of all ranks. Collective; waits for the device.

    Args:
        loss_max: result of HighestLoss.take.
        squares: result of UpdateSize.take_squares.
    """
    before_update = phase_ms[FORWARD] + phase_ms[BACKWARD] + phase_ms[WAIT]
    own = [*(phase_ms[phase] for phase in PHASES), power_watts or 0.0, float(power_watts is not None)]
    sums = torch.cat([squares, torch.tensor(own, dtype=torch.float64, device=squares.device)])
    times = torch.tensor([data_seconds, before_update], dtype=torch.float64, device=squares.device)
    maxima = torch.cat([loss_max.double().reshape(1), times])
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    parameters, changed, sampled, *phases, watts, devices = sums.tolist()
    highest, slowest_data, longest = maxima.tolist()
    ranks = dist.get_world_size()
    return AllRanks(
        loss_max=highest, data_seconds=slowest_data,
        phase_ms={phase: total / ranks for phase, total in zip(PHASES, phases, strict=True)}, pipeline_ms=longest,
        power_watts=watts / devices if devices else None, param_norm=math.sqrt(parameters),
        update_ratio=math.sqrt(changed / sampled) if sampled else math.nan)
