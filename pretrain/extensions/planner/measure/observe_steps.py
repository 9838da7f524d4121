"""Run a few real steps of an engine on random tokens, and take an inventory of its tensors in each step.

The inventory is taken after the last backward pass of a step and before the optimizer step. At ZeRO stages 0 and 1 no
gradient has been reduced at this point, so the inventory has all of them, as between two micro-batches. At stages 2 and
3 the backward pass itself has reduced the gradients.

Meanwhile a StorageTracker counts the bytes of all tensors that are alive, and their peak. On CUDA torch's allocator has
this count. On the CPU torch has none: there the tracker, a dispatch mode, sees every tensor that an operator returns,
also in the backward pass and in the optimizer. It also works on FakeTensors, whose storages have a size but no memory.
It misses the memory that an operator allocates and frees internally (packed matrices of oneDNN, working memory of
attention and softmax), DeepSpeed's shared memory for collectives (66 MiB a rank), and everything that is not a tensor.
The resident memory of the process, `process.resident_bytes`, includes all of these.
"""

import gc
import time

import torch
from deepspeed import DeepSpeedEngine
from torch.utils._pytree import tree_leaves

from pretrain.config.plan import Plan
from pretrain.engine.steps import random_batches, train_batch
from pretrain.extensions.planner.measure.rank_memory import RankMemory
from pretrain.extensions.planner.measure.tensor_inventory import (
    engine_tensors,
    footprint_of,
    held_storages,
    unaccounted_bytes,
)
from pretrain.memory.footprint import Footprint
from pretrain.memory.storage_tracker import StorageTracker, call_after_backward

_GLOO_RELEASE_S = 0.1  # gloo's threads release a tensor shortly after its collective has finished


def observe_steps(engine: DeepSpeedEngine, plan: Plan, *, steps: int, tracker: StorageTracker | None) -> RankMemory:
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
    if tracker is None:
        gc.collect()  # reference cycles of torch's compiler hold the inputs of the first calls
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        tracker.reset_peak()
    for _ in range(1, steps):
        train_batch(engine, batches)
    held, unaccounted = inventories[-1]
    if tracker is None:
        torch.cuda.synchronize()
        return RankMemory(held, torch.cuda.max_memory_allocated(), unaccounted)
    return RankMemory(held, tracker.peak_bytes, unaccounted)


def time_steps(engine: DeepSpeedEngine, plan: Plan, steps: int) -> list[float]:
    """Run `steps` steps and return the milliseconds of each. Do not use a tracker here: it slows down the steps."""
    batches, times = random_batches(plan), []
    for _ in range(steps):
        begin = time.perf_counter()
        float(train_batch(engine, batches))  # waits for the device
        times.append(1000 * (time.perf_counter() - begin))
    return times


