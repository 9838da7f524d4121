"""Phases of a step at which a rank's memory can peak, each as a Footprint.

    loss        the activations of all micro-batches in flight, one chunk of logits and its softmax
    backward    for each group of layers: its saved or recomputed activations, gradients of activations and of weights
    reduction   ZeRO stage 1: all gradients, the reduction bucket, and this rank's averaged gradients
    step        copies of gradients in the dtype that the optimizer is given, and the optimizer's working memory

Read from DeepSpeed 0.19.8: runtime/pipe/engine.py and schedule.py, runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py, runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py. Measured against real
engines in tests/distributed/memory/test_measure.py.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from pretrain.memory.estimate.activations import (
    block_backward,
    hidden_states_bytes,
    layer_input_bytes,
    layer_saved,
    saved_input_bytes,
)
from pretrain.memory.estimate.gradients import (
    gradients_in_backward,
    gradients_in_optimizer_step,
    gradients_in_reduction,
    reduction_in_backward,
)
from pretrain.memory.estimate.loss_activations import loss_backward, loss_peak, loss_saved
from pretrain.memory.estimate.masks import document_bytes, shared_mask_bytes
from pretrain.memory.estimate.model_shape import Layer, ModelShape
from pretrain.memory.estimate.optimizer_wrappers import optimizer_wrapper
from pretrain.memory.estimate.rank_parameters import INT64, MicroBatch, Rank
from pretrain.memory.estimate.states import states_of_rank
from pretrain.memory.estimate.states_zero3 import persistent_elements
from pretrain.memory.footprint import Footprint


class LayerGroup(NamedTuple):
    """Consecutive layers that are recomputed together, or a single layer that is not recomputed."""

    saved: int  # bytes that one micro-batch saves from its forward to its backward pass
    layers: tuple[Layer, ...]


def step_phases(rank: Rank) -> Iterator[tuple[str, Footprint]]:
    """Yield (name, footprint) of each phase of a rank's step at which its memory can peak."""
    layout = rank.layout
    steady = states_of_rank(rank) + _device("activations", _pipeline_slots(rank) + _masks(rank))
    groups = _groups_of_rank(rank)
    if rank.is_last_stage:
        yield "loss", steady + _loss_phase(rank, groups)
    for in_flight, accumulated in _backward_passes(rank):
        yield from (("backward", steady + footprint)
                    for footprint in _backward_phases(rank, groups, in_flight, accumulated))
    if layout.zero_stage == 1 and optimizer_wrapper(layout) == "zero12":
        yield "reduction", steady + gradients_in_reduction(rank)
    yield "step", steady + gradients_in_optimizer_step(rank) + _device("activations", _remaining_graph(rank))


def _device(role: str, size_bytes: int) -> Footprint:
    return Footprint.of([((role, "device"), size_bytes)])


def _loss_phase(rank: Rank, groups: tuple[LayerGroup, ...]) -> Footprint:
    """Return the memory of the forward pass of head and loss, on the last pipeline stage."""
    shape, batch = rank.shape, rank.micro_batch
    activations = rank.in_flight * sum(group.saved for group in groups) - loss_saved(shape, batch)
    if not rank.layout.uses_pipeline_module:  # a PipelineModule's hidden states are counted in _pipeline_slots
        activations += hidden_states_bytes(shape, batch)
    if not rank.accumulates:  # the graph of the previous step, which `engine.loss` references
        activations += _remaining_graph(rank)
    return _device("activations", activations) + _device("logits", loss_peak(shape, batch)) \
        + _gathered_parameters(rank) + gradients_in_backward(rank, 0, accumulated=rank.accumulates)


def _pipeline_slots(rank: Rank) -> int:
    """Bytes of hidden states that PipelineEngine keeps in its slots; 0 for the plain module.

    Slots hold the outputs of micro-batches, their inputs, and the receive buffers for inputs and gradients. The last
    pipeline stage does not clear `pipe_buffers['outputs']`, so that outputs of earlier micro-batches stay allocated
    with their graphs.
    """
    if not rank.layout.uses_pipeline_module:
        return 0
    slots = rank.in_flight + 1
    if rank.is_last_stage:
        slots = min(rank.pipe_buffers, rank.layout.gradient_accumulation_steps)
    if rank.pipeline_stage > 0:
        slots += rank.in_flight + 1
    earlier_graph = _remaining_graph(rank) if rank.accumulates else 0
    positions = rank.micro_batch.tokens * INT64 if rank.micro_batch.documents else 0
    return slots * (hidden_states_bytes(rank.shape, rank.micro_batch) + positions) + earlier_graph


def _masks(rank: Rank) -> int:
    """Bytes of attention masks and of tables for documents, on ranks with blocks."""
    if not any(layer.kind == "block" for layer in rank.layers()):
        return 0
    batch = rank.micro_batch
    return shared_mask_bytes(rank.shape, batch) + rank.in_flight * document_bytes(rank.shape, batch)


def _remaining_graph(rank: Rank) -> int:
    """Bytes that a micro-batch's graph holds after its backward pass: its received input and the input's gradient.

    Only the last of several pipeline stages keeps such a graph.
    """
    if rank.is_last_stage and rank.pipeline_stage > 0:
        return 2 * hidden_states_bytes(rank.shape, rank.micro_batch)
    return 0


def _groups_of_rank(rank: Rank) -> tuple[LayerGroup, ...]:
    return layer_groups(rank.shape, rank.layers(), rank.micro_batch, rank.layout.activation_checkpoint_interval)


@lru_cache(maxsize=512)
def layer_groups(shape: ModelShape, layers: tuple[Layer, ...], batch: MicroBatch,
                 interval: int) -> tuple[LayerGroup, ...]:
    """Divide layers into groups of `interval`, or into single layers if `interval` is 0 (no recomputation).

    A group that contains a block is recomputed and saves only its input (model/layer_specs.py, _worth_recomputing). The
    head computes the loss outside of the recomputed groups and is a group of its own.
    """
    saved = {layer: layer_saved(shape, layer, batch) for layer in set(layers)}
    body = sum(layer.kind != "head" for layer in layers)
    starts = [*range(0, body, interval or 1), *range(body, len(layers))]
    groups = []
    for start, end in pairwise([*starts, len(layers)]):
        group = layers[start:end]
        recomputed = interval and any(layer.kind == "block" for layer in group)
        saved_bytes = layer_input_bytes(shape, group[0], batch) if recomputed else sum(saved[layer] for layer in group)
        groups.append(LayerGroup(saved_bytes, group))
    return tuple(groups)


def _backward_passes(rank: Rank) -> list[tuple[int, bool]]:
    """List (micro-batches in flight, gradients already accumulated?) of the backward passes that can peak.

    The first backward pass has no accumulated gradients. If all micro-batches of the step are in flight at once, each
    pass has one micro-batch fewer than the pass before. Otherwise a later pass has as many micro-batches in flight as
    the first one and also accumulated gradients, so only this later pass can peak.
    """
    if rank.layout.gradient_accumulation_steps > rank.in_flight:
        return [(rank.in_flight, True)]
    first = [(rank.in_flight, False)]
    return [*first, (rank.in_flight - 1, True)] if rank.in_flight > 1 else first


def _backward_phases(rank: Rank, groups: tuple[LayerGroup, ...], in_flight: int,
                     accumulated: bool) -> Iterator[Footprint]:
    """Yield the footprint at the backward pass of each group of layers, last group first.

    In a run of equal groups only the first and the last are yielded, as memory changes evenly between them.
    """
    other_micro_batches = (in_flight - 1) * sum(group.saved for group in groups)
    waiting, done = sum(group.saved for group in groups), 0  # bytes; elements whose gradients are computed
    for index in reversed(range(len(groups))):
        saved, layers = groups[index]
        between_equals = 0 < index < len(groups) - 1 and layers == groups[index - 1].layers == groups[index + 1].layers
        if not between_equals:
            activations = other_micro_batches + waiting + _group_backward(rank, groups[index])
            weights = gradients_in_backward(rank, done, layers, accumulated=accumulated)
            yield _device("activations", activations) + weights + reduction_in_backward(rank, done) \
                + _gathered_parameters(rank, done)
        waiting -= saved
        done += sum(layer.size for layer in layers)


def _group_backward(rank: Rank, group: LayerGroup) -> int:
    """Bytes of a group's recomputed activations and of the gradients of its activations."""
    shape, batch, layers = rank.shape, rank.micro_batch, group.layers
    is_head = layers[-1].kind == "head"
    recomputed = 0
    if rank.layout.activation_checkpoint_interval and not is_head:
        recomputed = sum(layer_saved(shape, layer, batch) for layer in layers)
        recomputed -= saved_input_bytes(shape, layers[0], batch)
    windows = {layer.window for layer in layers if layer.kind == "block"}
    work = max((block_backward(shape, batch, window) for window in windows), default=0)
    if is_head:
        work += loss_backward(shape, batch)
    return (recomputed if recomputed > group.saved else 0) + work


def _gathered_parameters(rank: Rank, done: int = 0) -> Footprint:
    """Return the parameters that ZeRO stage 3 has gathered, without the persistent ones.

    These are the parameters of the current layers, prefetched parameters (`stage3_prefetch_bucket_size`), and
    parameters that the backward pass will reuse. One rank without offload gathers nothing: it uses its partitions.

    Args:
        done: elements of the parameters that the backward pass has released.
    """
    layout, groups = rank.layout, rank.groups()
    copies = layout.offload_param != "none" and layout.device_kind != "cpu"
    if layout.zero_stage < 3 or (all(group.ranks == 1 for group in groups) and not copies):
        return Footprint()
    total = sum(group.size for group in groups) - sum(persistent_elements(groups, layout).values())
    current = max(group.largest for group in groups) + layout.prefetch_bucket_size
    # Layout.reused_parameters includes the current layers' parameters only if parameters are prefetched.
    reused = layout.reused_parameters + (0 if layout.prefetch_bucket_size else current)
    gathered = min(total, max(current, reused), max(current, total - done))
    return _device("parameters", gathered * layout.element_bytes)
