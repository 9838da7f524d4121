"""A few real steps of an engine on random tokens, and what it holds in between.

The moment that counts is after the last backward pass of a step, before gradients are reduced and the optimizer runs:
gradients are then all there, as they are from the first micro-batch on. (Later, ZeRO-1 too has divided them.)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.config.validate import Plan
from pretrain.data.loader import MicroBatch
from pretrain.engine.steps import train_batch
from pretrain.memory.footprint import Footprint
from pretrain.memory.measure.storage_tracker import StorageTracker, peak_of
from pretrain.memory.measure.tensor_inventory import Holding, entries, holdings, unaccounted

_SHOWN = 12  # largest buffers
_SETTLE_S = 0.1  # gloo's threads let go of a tensor a moment after its collective is over


@dataclass(frozen=True)
class Observation:
    """What one rank's engine held and needed over some steps."""

    held: Footprint  # between backward pass and optimizer step
    unaccounted_bytes: int  # alive at that moment, seen by the tracker, and not reached from the engine; -1: no tracker
    peak_bytes: int  # of all tensors together, over all steps but the first
    reserved_bytes: int  # on CUDA, by the caching allocator; else 0
    buffers: list[tuple[str, int]]  # the largest, by name

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; `held` by role and place."""
        return {**vars(self), "held": self.held.to_json()}


def random_batches(plan: Plan) -> list[MicroBatch]:
    """A step's micro-batches for one rank; memory does not depend on what the tokens are."""
    shape = (plan.layout.micro_batch_size, plan.args.seq_length)

    def batch() -> MicroBatch:
        tokens_BT = torch.randint(plan.model.vocab_size, shape)
        return tokens_BT, (tokens_BT.clone(), torch.full(shape, 1.0 / (shape[0] * shape[1])))

    return [batch() for _ in range(plan.layout.gradient_accumulation_steps)]


def observe(engine: DeepSpeedEngine, plan: Plan, *, steps: int, tracker: StorageTracker | None) -> Observation:
    """Train `steps` steps, at least 2: the first one allocates the optimizer's states.

    Args:
        tracker: entered before the engine was built, where the device is no CUDA device.
    """
    moments: list[tuple[list[Holding], int]] = []
    batches = random_batches(plan)
    own = {tensor.untyped_storage()._cdata for tokens, (labels, weights) in batches
           for tensor in (tokens, labels, weights)}

    def look() -> None:
        time.sleep(_SETTLE_S if tracker is not None else 0)
        found = holdings(engine)
        alive = {} if tracker is None else {key: size for key, size in tracker.sizes.items() if key not in own}
        moments.append((found, unaccounted(found, alive) if tracker is not None else -1))

    if tracker is not None:
        for *_, tensor in entries(engine):  # page-locked buffers of NVMe offload come from no operator
            tracker.add(tensor)
    call_after_backward(engine, look)
    train_batch(engine, batches)
    with peak_of(torch.device(engine.device).type, tracker) as peaks:
        for _ in range(1, steps):
            train_batch(engine, batches)
    found, rest = moments[-1]
    largest = sorted((item for item in found if item.role == "buffers"), key=lambda item: -item.size_bytes)[:_SHOWN]
    return Observation(
        held=Footprint.of(((item.role, item.place), item.size_bytes) for item in found), unaccounted_bytes=rest,
        peak_bytes=peaks["peak_bytes"], reserved_bytes=peaks.get("reserved_bytes", 0),
        buffers=[(item.name, item.size_bytes) for item in largest])


def time_steps(engine: DeepSpeedEngine, plan: Plan, steps: int) -> list[float]:
    """Milliseconds of each of so many steps; not under a tracker, which takes its own time."""
    batches, times = random_batches(plan), []
    for _ in range(steps):
        begin = time.perf_counter()
        float(train_batch(engine, batches))  # waits for the device
        times.append(1000 * (time.perf_counter() - begin))
    return times


def call_after_backward(engine: DeepSpeedEngine, action: Callable[[], None]) -> None:
    """Have `action` called in every step after the last backward pass, before a pipeline reduces gradients, and in the
    plain engine before the optimizer's step (there ZeRO-2 and 3 have reduced them in the backward pass itself).
    """
    if isinstance(engine, PipelineEngine):
        follows = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def reduce_tied_grads(self: PipelineEngine) -> None:
            action()
            follows(self)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: reduce_tied_grads}
        return
    take_step = engine._take_model_step

    def take_model_step(*args: Any) -> None:
        action()
        take_step(*args)

    engine._take_model_step = take_model_step
