"""Phases of a step at which a rank's memory can peak, each as a Footprint.

    loss        the activations of all micro-batches in flight, one chunk of logits and its softmax
    backward    for each group of layers: its saved or recomputed activations, gradients of activations and of weights
    reduction   ZeRO stage 1: all gradients, the reduction bucket, and this rank's averaged gradients
    step        copies of gradients in the dtype that the optimizer is given, and the optimizer's working memory

Read from DeepSpeed 0.19.8: runtime/pipe/engine.py and schedule.py, runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py, runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py. Measured against real
engines of all layouts (`ds-pretrain compare measure`).
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from pretrain.config.layout import Layout
from pretrain.memory.estimate.gradients import (
    gradients_in_backward,
    gradients_in_optimizer_step,
    gradients_in_reduction,
    reduction_in_backward,
)
from pretrain.memory.estimate.rank import ParameterGroup, Rank, optimizer_wrapper, pipeline_stage_layers
from pretrain.memory.estimate.states_zero3 import persistent_elements
from pretrain.memory.footprint import Footprint
from pretrain.model.attention_memory import document_bytes
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.implementation import LayerBytes
from pretrain.model.layer_memory import layer_input_bytes
from pretrain.model.operator_memory import INT64, MicroBatch, hidden_states_bytes
from pretrain.model.recompute import Recompute


class LayerGroup(NamedTuple):
    """Consecutive layers that are recomputed together, or a single layer that is not completely recomputed."""

    saved: int  # device bytes that one micro-batch saves from its forward to its backward pass
    layers: tuple[Layer, ...]
    part: str = "none"  # what is recomputed: "none", "attention" or "mlp" of a block, or "blocks": the group
    offloaded: int = 0  # bytes of the group's input, if it is kept in host memory, for one micro-batch


def step_phases(rank: Rank, states: Footprint) -> Iterator[tuple[str, Footprint]]:
    """Yield (name, footprint) of each phase of a rank's step at which its memory can peak.

    Args:
        states: the result of `states_of_rank`.
    """
    layout = rank.layout
    groups = _groups_of_rank(rank)
    steady = states + Footprint.on_device(activations=_pipeline_slots(rank) + _masks(rank)) + \
        _offloaded(rank, groups)
    if rank.is_last_stage:
        yield "loss", steady + _loss_phase(rank, groups)
    for in_flight, accumulated in _backward_passes(rank):
        yield from (("backward", steady + footprint)
                    for footprint in _backward_phases(rank, groups, in_flight, accumulated))
    if layout.zero_stage == 1 and optimizer_wrapper(layout) == "zero12":
        yield "reduction", steady + gradients_in_reduction(rank)
    yield "step", steady + gradients_in_optimizer_step(rank) + Footprint.on_device(activations=_remaining_graph(rank))


def _offloaded(rank: Rank, groups: tuple[LayerGroup, ...]) -> Footprint:
    """Return the pinned memory of offloaded inputs. torch rounds each tensor up to a power of two: see pinning_loss."""
    sizes = [group.offloaded for group in groups if group.offloaded and rank.micro_batch.cuda]
    rounding = sum((1 << (size - 1).bit_length()) - size for size in sizes)
    return Footprint.of([(("activations", "pinned"), rank.in_flight * sum(sizes)),
                         (("margin", "pinned"), rank.in_flight * rounding)])


def _loss_phase(rank: Rank, groups: tuple[LayerGroup, ...]) -> Footprint:
    """Return the memory of the forward pass of head and loss, on the last pipeline stage."""
    model, batch = rank.model, rank.micro_batch
    head = layer_bytes(model, model.layers()[-1], batch)
    activations = rank.in_flight * sum(group.saved for group in groups) - head.saved
    if not rank.layout.uses_pipeline_module:  # a PipelineModule's hidden states are counted in _pipeline_slots
        activations += hidden_states_bytes(model, batch)
    if not rank.accumulates:  # the graph of the previous step, which `engine.loss` references
        activations += _remaining_graph(rank)
    return Footprint.on_device(activations=activations, logits=head.forward_peak) \
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
    return slots * (hidden_states_bytes(rank.model, rank.micro_batch) + positions) + earlier_graph


def _masks(rank: Rank) -> int:
    """Bytes of attention masks and of tables for documents, on ranks with blocks."""
    if not any(layer.kind == "block" for layer in rank.layers):
        return 0
    batch = rank.micro_batch
    model = rank.model
    return model.implementation.shared_bytes(model, batch) + rank.in_flight * document_bytes(model, batch)


def _remaining_graph(rank: Rank) -> int:
    """Bytes that a micro-batch's graph holds after its backward pass: its received input and the input's gradient.

    Only the last of several pipeline stages keeps such a graph.
    """
    if rank.is_last_stage and rank.pipeline_stage > 0:
        return 2 * hidden_states_bytes(rank.model, rank.micro_batch)
    return 0


def _groups_of_rank(rank: Rank) -> tuple[LayerGroup, ...]:
    recompute, first_block = rank.layout.recomputation, 0
    if recompute.every > 1:
        earlier = (pipeline_stage_layers(rank.model, rank.layout, stage) for stage in range(rank.pipeline_stage))
        first_block = sum(layer.kind == "block" for layers in earlier for layer in layers)
    return layer_groups(rank.model, rank.layers, rank.micro_batch, recompute, first_block)


@lru_cache(maxsize=4096)  # most blocks of a model are one object, and the phases of a step ask for the same layers
def layer_bytes(config: ModelConfig, layer: Layer, batch: MicroBatch, part: str = "none") -> LayerBytes:
    """Return the memory of a layer. Raises ConfigError if it is unknown. `part`: what of a block is recomputed."""
    return config.implementation.layer_bytes(config, layer, batch, part)


@lru_cache(maxsize=512)
def layer_groups(model: ModelConfig, layers: tuple[Layer, ...], batch: MicroBatch, recompute: Recompute,
                 first_block: int = 0) -> tuple[LayerGroup, ...]:
    """Divide layers into the groups that are recomputed (model/run_layers.py), and single layers.

    A group that contains a block is recomputed and saves only its input. The head computes the loss outside of the
    recomputed groups and is a group of its own.

    Args:
        first_block: index in the model of the first block of `layers`.
    """
    known: dict[tuple[int, str], int] = {}  # most layers are one object, and its memory is looked up once

    def saved_bytes(layer: Layer, part: str) -> int:
        key = id(layer), part
        if key not in known:
            known[key] = layer_bytes(model, layer, batch, part).saved
        return known[key]

    body = sum(layer.kind != "head" for layer in layers)
    starts = [*range(0, body, recompute.interval or 1), *range(body, len(layers))]
    groups = []
    for start, end in pairwise([*starts, len(layers)]):
        group = layers[start:end]
        blocks = sum(layer.kind == "block" for layer in group)
        part = recompute.part_of(first_block) if blocks else "none"
        part = "blocks" if blocks and recompute.interval else part
        first_block += blocks
        if part != "blocks":
            groups.append(LayerGroup(sum(saved_bytes(layer, part) for layer in group), group, part))
            continue
        size = layer_input_bytes(model, group[0], batch)
        # token ids, and the input that a pipeline stage receives, are not offloaded (model/run_layers.py)
        offloads = recompute.offload and group[0].kind != "embedding" and start > 0
        on_device = 0 if offloads and batch.cuda else size  # on a CPU, the copy takes the place of the input
        groups.append(LayerGroup(on_device, group, part, size if offloads else 0))
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
        saved, layers = groups[index].saved, groups[index].layers
        between_equals = 0 < index < len(groups) - 1 and groups[index - 1] == groups[index] == groups[index + 1]
        if not between_equals:
            activations = other_micro_batches + waiting + _group_backward(rank, groups[index])
            weights = gradients_in_backward(rank, done, layers, accumulated=accumulated)
            yield Footprint.on_device(activations=activations) + weights + reduction_in_backward(rank, done) \
                + _gathered_parameters(rank, done)
        waiting -= saved
        done += sum(layer.size for layer in layers)
    yield Footprint.on_device(activations=other_micro_batches) + reduction_in_backward(rank, done) \
        + gradients_in_backward(rank, done, accumulated=accumulated)


def _group_backward(rank: Rank, group: LayerGroup) -> int:
    """Bytes of a group's recomputed activations and of the gradients of its activations."""
    model, batch, layers = rank.model, rank.micro_batch, group.layers
    recomputed = 0
    if group.part == "blocks":
        recomputed = sum(layer_bytes(model, layer, batch).saved for layer in layers)
        recomputed -= 0 if group.offloaded else layer_bytes(model, layers[0], batch).saved_input
    if group.offloaded:  # the group's input is there again, and on GPUs also the next group's
        missing = group.offloaded - layer_bytes(model, layers[0], batch).saved_input
        recomputed += missing + (group.offloaded if batch.cuda else 0)
    part = group.part if group.part != "blocks" else "none"
    work = max((layer_bytes(model, layer, batch, part).backward for layer in dict.fromkeys(layers)
                if layer.kind == "block"), default=0)
    if layers[-1].kind == "head":
        work += layer_bytes(model, layers[-1], batch).backward
    return recomputed + work


def _gathered_parameters(rank: Rank, done: int = 0) -> Footprint:
    """Return the parameters that ZeRO stage 3 has gathered, without the persistent ones.

    These are the parameters of the current layers, prefetched parameters (`stage3_prefetch_bucket_size`), and
    parameters that the backward pass will reuse. One rank without offload gathers nothing: it uses its partitions.

    Args:
        done: elements of the parameters that the backward pass has released.
    """
    layout, groups = rank.layout, rank.groups
    copies = layout.offload_param != "none" and layout.device_kind != "cpu"
    if layout.zero_stage < 3 or (all(group.ranks == 1 for group in groups) and not copies):
        return Footprint()
    total = _not_persistent(groups, layout)
    current = max(group.largest for group in groups) + layout.prefetch_bucket_size
    # Layout.reused_parameters includes the current layers' parameters only if parameters are prefetched.
    reused = layout.reused_parameters + (0 if layout.prefetch_bucket_size else current)
    gathered = min(total, max(current, reused), max(current, total - done))
    return Footprint.on_device(parameters=gathered * layout.element_bytes)


@lru_cache(maxsize=16)
def _not_persistent(groups: tuple[ParameterGroup, ...], layout: Layout) -> int:
    return sum(group.size for group in groups) - sum(persistent_elements(groups, layout).values())
