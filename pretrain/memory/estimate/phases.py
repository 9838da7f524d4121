"""What comes and goes within a step: the moments at which memory may be at its most, each as a footprint of one rank.

    loss        all activations of the micro-batches in flight, and a chunk of logits with its softmax
    backward    in each group of layers: what it kept or recomputed, gradients of activations and of weights
    reduction   ZeRO-1's gradients, its bucket, and this rank's averaged ones
    step        the fp32 copies of gradients that the optimizer is given

Read from DeepSpeed 0.19.8: runtime/pipe/engine.py and schedule.py, runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py, runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from pretrain.config.layout import Layout
from pretrain.memory.estimate.activations import (
    Pass,
    block_backward,
    boundary_bytes,
    input_bytes,
    layer_kept,
    loss_backward,
    loss_kept,
    loss_peak,
    own_input_bytes,
)
from pretrain.memory.estimate.model_shape import Layer, ModelShape
from pretrain.memory.estimate.nvme import retained_gradients
from pretrain.memory.estimate.optimizer_phases import optimizer_step, reduction
from pretrain.memory.estimate.pipeline_stages import local_size, pipeline_stage_layers
from pretrain.memory.estimate.rank import Rank
from pretrain.memory.estimate.states import (
    bucket_bytes,
    elements_touched,
    engine_kind,
    master_bytes,
    persistent,
    states_of_rank,
)
from pretrain.memory.footprint import Footprint

_FP64 = 8
_NORM_ELEMENTS = 250_000_000  # of a gradient whose norm is taken at a time


def step_phases(shape: ModelShape, layout: Layout, *, pipeline_stage: int = 0,
            zero_rank: int = 0) -> Iterator[tuple[str, Footprint]]:
    """(name, footprint) of the moments of one rank's step at which its memory may be at its most."""
    rank = Rank(shape, layout, pipeline_stage, zero_rank)
    held = states_of_rank(shape, layout, pipeline_stage=pipeline_stage, zero_rank=zero_rank) + _between_layers(rank)
    waiting = _groups(rank)
    kept = [kept for kept, _ in waiting]
    if rank.is_last:
        before = 0 if rank.accumulates else _graph(rank)  # that `engine.loss` holds
        hidden = 0 if layout.uses_pipeline_module else boundary_bytes(shape, rank.one)  # else in a slot
        alive = rank.in_flight * sum(kept) - loss_kept(shape, rank.one) + hidden + before
        loss = Footprint.of([(("activations", "device"), alive), (("logits", "device"), loss_peak(shape, rank.one))])
        yield "loss", held + _gathered(rank) + loss + _gradients(rank, 0, accumulated=rank.accumulates)
    for in_flight, accumulated in _backward_passes(rank):
        yield from (("backward", held + part) for part in _backward(rank, waiting, in_flight, accumulated))
    if layout.zero_stage == 1 and engine_kind(layout) == "zero12":
        yield "reduction", held + reduction(rank)
    yield "step", held + optimizer_step(rank) + Footprint.of([(("activations", "device"), _graph(rank))])


def _between_layers(rank: Rank) -> Footprint:
    """What PipelineEngine keeps in its slots: outputs, on the last stage those of micro-batches before too
    (`pipe_buffers['outputs']` is not cleared there), with their graphs; inputs, of which the layers have copies; and
    the tensors that inputs and gradients are received in. The plain module keeps nothing."""
    if not rank.layout.uses_pipeline_module:
        return Footprint()
    slots = min(rank.pipe_buffers, rank.layout.gradient_accumulation_steps) if rank.is_last else rank.in_flight + 1
    slots += rank.in_flight + 1 if rank.pipeline_stage > 0 else 0
    before = _graph(rank) if rank.accumulates else 0  # of the other slot
    return Footprint.of([(("activations", "device"), slots * boundary_bytes(rank.shape, rank.one) + before)])


def _graph(rank: Rank) -> int:
    """What the last stage's graph of a micro-batch holds after its backward pass: its input and the gradient of that.
    """
    return 2 * boundary_bytes(rank.shape, rank.one) if rank.is_last and rank.pipeline_stage > 0 else 0


def _groups(rank: Rank) -> tuple[tuple[int, tuple[Layer, ...]], ...]:
    return groups_of_layers(rank.shape, pipeline_stage_layers(rank.shape, rank.layout, rank.pipeline_stage), rank.one,
                            rank.layout.activation_checkpoint_interval)


@lru_cache(maxsize=512)
def groups_of_layers(shape: ModelShape, layers: tuple[Layer, ...], one: Pass,
                     interval: int) -> tuple[tuple[int, tuple[Layer, ...]], ...]:
    """(bytes that a micro-batch keeps, layers) of each group of `interval` layers; one that is recomputed, which are
    those with a block, keeps its input (model/specs.py, _worth_recomputing). 0: nothing is, each layer for itself. The
    head, which makes the loss outside of all groups, comes alone."""
    sizes = {layer: layer_kept(shape, layer, one) for layer in set(layers)}
    found, body = [], [layer for layer in layers if layer.kind != "head"]
    cuts = [*range(0, len(body), interval or 1), *range(len(body), len(layers))]
    for start, end in pairwise([*cuts, len(layers)]):
        group = layers[start:end]
        recomputed = interval and any(layer.kind == "block" for layer in group)
        found.append((input_bytes(shape, group[0], one) if recomputed else sum(sizes[layer] for layer in group), group))
    return tuple(found)


def _backward_passes(rank: Rank) -> list[tuple[int, bool]]:
    """(micro-batches in flight, whether gradients of others are there) of the passes that may need the most: the first
    one has no gradients yet; where all micro-batches are in flight at once, every later one has fewer of them.
    """
    if rank.layout.gradient_accumulation_steps > rank.in_flight:
        return [(rank.in_flight, True)]
    return [(rank.in_flight, False)] + [(rank.in_flight - 1, True)] * (rank.in_flight > 1)


def _backward(rank: Rank, waiting: tuple[tuple[int, tuple[Layer, ...]], ...], in_flight: int,
              accumulated: bool) -> Iterator[Footprint]:
    """Group by group, from the last: the activations of all before it, its own (recomputed if need be), and gradients.

    Of a run of equal groups only the first and the last are looked at, as everything between changes evenly.
    """
    one, shape, interval = rank.one, rank.shape, rank.layout.activation_checkpoint_interval
    others = (in_flight - 1) * sum(kept for kept, _ in waiting)
    before, done = sum(kept for kept, _ in waiting), 0
    for index in reversed(range(len(waiting))):
        kept, layers = waiting[index]
        same = 0 < index < len(waiting) - 1 and layers == waiting[index - 1][1] == waiting[index + 1][1]
        if not same:
            recomputed = 0
            if interval and layers[-1].kind != "head":
                recomputed = sum(layer_kept(shape, layer, one) for layer in layers)
                recomputed -= own_input_bytes(shape, layers[0], one)
            work = max((block_backward(shape, one) for layer in layers if layer.kind == "block"), default=0)
            work += loss_backward(shape, one) if layers[-1].kind == "head" else 0
            alive = others + before + (recomputed if recomputed > kept else 0) + work
            weights = _gradients(rank, done, layers, accumulated=accumulated) + _reduced(rank, done)
            yield Footprint.of([(("activations", "device"), alive)]) + weights + _gathered(rank, done)
        before -= kept
        done += sum(layer.size for layer in layers)


def _gradients(rank: Rank, done: int, layers: tuple[Layer, ...] = (), *, accumulated: bool) -> Footprint:
    """Gradients of weights during the backward pass, as a difference from those between micro-batches.

    Args:
        done: parameters (elements) of the stage whose gradients are there already.
        layers: the layers at work, the largest of whose gradients is there beside the sum it is added to.
        accumulated: whether those of micro-batches before are there.
    """
    layout, kind = rank.layout, engine_kind(rank.layout)
    size = layout.element_bytes
    largest = max((local_size(tensor, layout) for layer in layers for tensor in layer.tensors), default=0)
    missing = 0
    if not accumulated and kind == "zero12" and layout.zero_stage == 2:
        missing = _stage_2_gradients(rank) if not done else 0  # there from the first reduction on
    elif not accumulated and kind != "zero3":
        total = sum(group.size for group in rank.groups())
        missing = max(0, total - done - largest) * size
        largest = 0
    waiting = _tied_elements(rank) * size if done and (accumulated or layout.zero_stage > 1) else 0
    return Footprint.of([(("gradients", "device"), largest * size + waiting - missing)])


def _tied_elements(rank: Rank) -> int:
    """Of the matrix that head and embedding share on one stage: the head's gradient waits for the embedding's."""
    tied = [layer for layer in pipeline_stage_layers(rank.shape, rank.layout, rank.pipeline_stage) if layer.tied]
    return local_size(tied[0].tensors[0], rank.layout) if len(tied) > 1 else 0


def _reduced(rank: Rank, done: int) -> Footprint:
    """What ZeRO-2 and 3 need beside their states once the first gradients of a micro-batch are reduced.

    Stage 2: the bucket (two, if reduction overlaps), and, while gradients accumulate, this rank's of this micro-batch
    (`grads_in_partition`) beside the sum. Stage 3: the copy of the bucket that is reduced and scattered. Offloaded: the
    norm of each gradient, taken in fp64 (`_constant_buffered_norm2`, `set_norm_for_param_grad_in_gpu`).

    Args:
        done: parameters (elements) of the stage whose gradients have been reduced.
    """
    layout, groups = rank.layout, rank.groups()
    if layout.zero_stage < 2 or not done:
        return Footprint()
    three, total = layout.zero_stage == 3, sum(group.size for group in groups)
    parts = []
    if three:
        bucket = min(layout.reduce_bucket_size, total) * layout.element_bytes
        if layout.offload_optimizer == "nvme":
            retained = sum(retained_gradients(group.parts, master_bytes(layout), layout) for group in groups)
            parts.append((("gradients", "device"), round(retained * done / total)))
    else:
        bucket = bucket_bytes(layout)
        parts.append((("gradients", "device"), _stage_2_gradients(rank) if rank.accumulates else 0))
    largest = max(max(group.parts) if three else group.largest for group in groups)
    if layout.offload_optimizer != "none":
        bucket += min(largest, _NORM_ELEMENTS) * _FP64
    elif layout.grad_accum_bytes != layout.element_bytes:  # converted before it is added
        bucket += largest * layout.grad_accum_bytes
    return Footprint.of([*parts, (("buffers", "device"), bucket)])


def _stage_2_gradients(rank: Rank) -> int:
    """Bytes of the gradients that stage 2 keeps on the device, of parameters that lie in this rank's part."""
    layout = rank.layout
    if layout.offload_optimizer != "none" or layout.grad_accum_bytes != layout.element_bytes:
        return 0
    touched = sum(elements_touched(group, layout, rank.zero_rank % group.ranks) for group in rank.groups())
    return touched * layout.element_bytes


def _gathered(rank: Rank, done: int = 0) -> Footprint:
    """The parameters that stage 3 has whole: for the layers at work, for the next ones (`stage3_prefetch_bucket_size`),
    and those that come again. On one rank without offload they are the partitions themselves.

    Args:
        done: parameters (elements) that the backward pass has let go.
    """
    layout, groups = rank.layout, rank.groups()
    copies = layout.offload_param != "none" and layout.device_kind != "cpu"
    if layout.zero_stage < 3 or (all(group.ranks == 1 for group in groups) and not copies):
        return Footprint()
    total = sum(group.size for group in groups) - sum(persistent(groups, layout).values())
    at_work = max(group.largest for group in groups) + layout.prefetch_bucket_size
    ahead = layout.reused_parameters + (0 if layout.prefetch_bucket_size else at_work)  # prefetches count those at work
    live = min(total, max(at_work, ahead), max(at_work, total - done))
    return Footprint.of([(("parameters", "device"), live * layout.element_bytes)])
