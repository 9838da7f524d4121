"""--what schedule: the order of the instructions, the divided backward pass, and the figures.

tests/bench/test_bench.py runs both schedules on an engine with two ranks.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    PipeInstruction,
    ReduceTiedGrads,
    TrainSchedule,
)

from pretrain.bench.baselines.zero_bubble import DividedLinear, PostponedProduct, WeightGradients, ZeroBubbleSchedule
from pretrain.bench.processes.interleave import InterleavedResults
from pretrain.bench.sections.schedule import ENGINE, MICRO_BATCHES, highest_gain, schedule_section


def instructions(schedule: type[TrainSchedule], stages: int, micro_batches: int, stage: int) -> list[PipeInstruction]:
    steps = schedule(micro_batches=micro_batches, stages=stages, stage_id=stage).steps()
    return [instruction for step in steps for instruction in step]


@pytest.mark.parametrize(("stages", "stage"), [(2, 0), (2, 1), (4, 1), (4, 2), (4, 3), (8, 5)])
@pytest.mark.parametrize("micro_batches", [1, 8, 32])
def test_zero_bubble_adds_weight_gradients_to_1f1b(stages: int, stage: int, micro_batches: int) -> None:
    """Each micro-batch has its weight gradients once, after its backward pass and before the reduction."""
    extended = instructions(ZeroBubbleSchedule, stages, micro_batches, stage)
    added = [instruction for instruction in extended if isinstance(instruction, WeightGradients)]
    others = [instruction for instruction in extended if not isinstance(instruction, WeightGradients)]
    assert list(map(repr, others)) == list(map(repr, instructions(TrainSchedule, stages, micro_batches, stage)))
    assert len(added) == micro_batches
    held = postponed = 0
    for instruction in extended:
        held += isinstance(instruction, ForwardPass) - isinstance(instruction, WeightGradients)
        postponed += isinstance(instruction, BackwardPass) - isinstance(instruction, WeightGradients)
        assert postponed >= 0
        assert held <= stages  # micro-batches, as many as the first stage of 1F1B
        assert not isinstance(instruction, ReduceTiedGrads) or postponed == 0


@pytest.mark.parametrize("has_bias", [True, False])
def test_divided_linear_layer_has_the_gradients_of_an_undivided_one(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator).requires_grad_(needed) for shape, needed in (
        ((2, 3, 4), True), ((5, 4), True), ((2, 3, 5), False)))
    bias = torch.randn(5, generator=generator).requires_grad_() if has_bias else None
    inputs = [x, weight, *([bias] if bias is not None else [])]
    expected = torch.autograd.grad(F.linear(x, weight, bias), inputs, grad)
    postponed: list[PostponedProduct] = []
    DividedLinear.apply(x, weight, bias, postponed).backward(grad)
    assert torch.equal(x.grad, expected[0])
    assert weight.grad is None
    for product in postponed:
        product.add_gradients()
    for parameter, gradient in zip(inputs[1:], expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def answers(norm: float) -> InterleavedResults:
    """Two repetitions, in which 1F1B takes 3 s and 5 s, and ZB-H1 2 s and 4 s: the machine is faster in the first one.

    One step of ZB-H1 with the fewest micro-batches has another norm.
    """
    found: list[dict[str, Any]] = [
        {"seconds": before + after, "losses": [6.0], "grad_norms": [1.5]} for before in (0.0, 2.0)
        for _ in MICRO_BATCHES for after in (2.5, 2.5, 1.5, 3.5)]
    found[1]["grad_norms"] = [norm]
    peaks = [{f"{count} {on}": 2**20 * (rank + 2 * on) for count in MICRO_BATCHES for on in (False, True)}
             for rank in (1, 2)]
    return InterleavedResults(facts={ENGINE: {"ranks": [{"peaks": rank} for rank in peaks]}}, answers={ENGINE: found})


def test_figures_of_the_schedules() -> None:
    """The second and the third step of four run ZB-H1."""
    section = schedule_section(answers(1.5), micro_batch_size=1, steps=1)
    assert section.failures == []
    for values in section.data["micro_batches"].values():
        assert values["step_time_ms"] == {"1F1B": 4000.0, "ZB-H1": 3000.0}
        assert values["ratios"] == [3.0 / 2.0, 5.0 / 4.0]
        assert values["ratio"] == 1.375
        assert values["peak_memory_bytes"] == {"1F1B": 2 * 2**20, "ZB-H1": 4 * 2**20}
    assert section.rows[0] == ["4", "4,000 ms", "3,000 ms", "1.375 (1.250 to 1.500)", "1.154", "2.0 MiB", "4.0 MiB"]
    assert highest_gain(2, 8) == pytest.approx(27 / 25)
    assert highest_gain(4, 16) == pytest.approx(57 / 51)


def test_schedules_with_different_gradients_are_a_failure() -> None:
    section = schedule_section(answers(1.25), micro_batch_size=1, steps=1)
    assert section.failures == ["schedule: the steps with 4 micro-batches have different grad_norms: [1.25, 1.5]"]
    assert not any("equal in all bits" in note for note in section.notes)
