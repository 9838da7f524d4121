"""Run a few real steps of an engine on random tokens, and take an inventory of its tensors in each step.

The inventory is taken after the last backward pass of a step and before the optimizer step. At ZeRO stages 0 and 1 no
gradient has been reduced at this point, so the inventory has all of them, as between two micro-batches. At stages 2 and
3 the backward pass itself has reduced the gradients.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils._pytree import tree_leaves

from pretrain.config.validate import Plan
from pretrain.data.loader import MicroBatch
from pretrain.engine.steps import train_batch
from pretrain.memory.footprint import Footprint
from pretrain.memory.measure.storage_tracker import StorageTracker, measured_peak
from pretrain.memory.measure.tensor_inventory import engine_tensors, footprint_of, held_storages, unaccounted_bytes

_GLOO_RELEASE_S = 0.1  # gloo's threads release a tensor shortly after its collective has finished


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one rank's engine over some steps."""

    held: Footprint  # between backward pass and optimizer step
    unaccounted_bytes: int  # of tensors that the tracker counts but the inventory did not find; -1: no tracker
    peak_bytes: int  # of all tensors together, over all steps but the first

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "held": self.held.to_json()}


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


def observe_steps(engine: DeepSpeedEngine, plan: Plan, *, steps: int, tracker: StorageTracker | None) -> EngineMemory:
    """Train `steps` steps. There must be at least 2, because the first one allocates the optimizer states.

    Args:
        tracker: a tracker that was entered before the engine was built; None on CUDA.
    """
    inventories: list[tuple[Footprint, int]] = []  # of each step: (footprint, unaccounted bytes)
    batches = random_batches(plan)
    batch_storages = {tensor.untyped_storage()._cdata for tensor in tree_leaves(batches)}

    def take_inventory() -> None:
        if tracker is None:
            inventories.append((footprint_of(held_storages(engine)), -1))
            return
        time.sleep(_GLOO_RELEASE_S)
        held = held_storages(engine)
        alive = {key: size for key, size in tracker.sizes.items() if key not in batch_storages}
        inventories.append((footprint_of(held), unaccounted_bytes(held, alive)))

    if tracker is not None:
        for *_, tensor in engine_tensors(engine):  # no operator returns the page-locked buffers of NVMe offload
            tracker.add(tensor)
    call_after_backward(engine, take_inventory)
    train_batch(engine, batches)
    with measured_peak(torch.device(engine.device).type, tracker) as peaks:
        for _ in range(1, steps):
            train_batch(engine, batches)
    held, unaccounted = inventories[-1]
    return EngineMemory(held, unaccounted, peaks["peak_bytes"])


def time_steps(engine: DeepSpeedEngine, plan: Plan, steps: int) -> list[float]:
    """Run `steps` steps and return the milliseconds of each. Do not use a tracker here: it slows down the steps."""
    batches, times = random_batches(plan), []
    for _ in range(steps):
        begin = time.perf_counter()
        float(train_batch(engine, batches))  # waits for the device
        times.append(1000 * (time.perf_counter() - begin))
    return times


def call_after_backward(engine: DeepSpeedEngine, action: Callable[[], None]) -> None:
    """Call `action` in every later step after the last backward pass.

    At ZeRO stages 0 and 1, a pipeline engine and a plain one (with sequence or expert parallelism) call `action` before
    they reduce gradients. At stages 2 and 3 the backward pass reduces, and `action` is called before the step.
    """
    if isinstance(engine, PipelineEngine):
        original_reduce = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def reduce_tied_grads(self: PipelineEngine) -> None:
            action()
            original_reduce(self)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: reduce_tied_grads}
        return
    if engine.zero_optimization_stage() < 2:
        original_allreduce = engine.allreduce_gradients

        def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
            if engine.is_gradient_accumulation_boundary():
                action()
            original_allreduce(*args, **kwargs)

        engine.allreduce_gradients = allreduce_gradients
        return
    original_step = engine._take_model_step

    def take_model_step(*args: Any) -> None:
        action()
        original_step(*args)

    engine._take_model_step = take_model_step
