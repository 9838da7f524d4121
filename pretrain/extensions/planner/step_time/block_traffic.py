"""Bytes that ranks exchange inside of the blocks: those that share matrices, sequences or experts.

tests/extensions/planner/test_traffic.py compares the counts with real engines.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from pretrain.config.layout import Layout
from pretrain.memory.estimate.rank import pipeline_stage_bounds
from pretrain.model.description import ModelConfig, local_kv_heads
from pretrain.model.recompute import Recompute

LINKS = ("network", "pcie", "disk")  # "network": between ranks, also of one node
PHASES = ("forward", "backward", "step")  # "step": once, after the last micro-batch


@dataclass(frozen=True)
class Transfer:
    """Bytes transferred for one purpose in a step. The field names are keys of `ds-pretrain compare --json`."""

    what: str
    link: str  # network, pcie, disk
    phase: str  # forward, backward, step
    bytes: float  # of a collective: what one rank sends, and also receives, in a ring
    ranks: int = 1  # number of ranks that take part
    stride: int = 1  # difference between the numbers of neighbouring ranks
    overlaps: bool = False  # whether it runs at the same time as the computation of its phase
    messages: float = 1.0  # number of collectives or copies in a step: each has a latency


@dataclass
class _Counts:
    """Collectives of some blocks in a micro-batch; `again`: those that the backward pass repeats for its own use.

    Inputs are gathered before the first of two products, and outputs are summed after the second one.
    """

    blocks: int = 0
    moe_blocks: int = 0
    inputs: float = 0.0
    outputs: float = 0.0
    again_inputs: float = 0.0
    again_outputs: float = 0.0
    again_blocks: int = 0  # whose attention is recomputed
    again_moe_blocks: int = 0  # whose experts are recomputed


def hidden_bytes(layout: Layout, model: ModelConfig) -> float:
    """Bytes of the hidden states of one micro-batch on one rank, which has a shard of each sequence."""
    shards = layout.sequence_parallel_size * layout.tensor_parallel_size
    return layout.micro_batch_size * layout.seq_length / shards * model.hidden_size * layout.element_bytes


def block_transfers(layout: Layout, model: ModelConfig) -> list[Transfer]:
    """List the collectives of all blocks of a rank of the pipeline stage that has most blocks.

    Ulysses: an all-to-all of queries, keys and values, and one of the outputs of attention (arXiv 2309.14509). Experts:
    two all-to-alls of each token's rows (DeepSpeed-MoE, arXiv 2201.05596).
    """
    if layout.tensor_parallel_size * layout.sequence_parallel_size * layout.expert_parallel_size == 1:
        return []
    counts = _counts(layout.recomputation, model, *_largest_stage(layout, model))
    hidden, shards = hidden_bytes(layout, model), layout.sequence_parallel_size
    heads = model.num_heads + shards * local_kv_heads(model.num_heads, model.num_kv_heads, shards)
    transfers = _tensor_parallel(layout, model, counts, hidden) if layout.tensor_parallel_size > 1 else []
    for what, ranks, stride, size, count, again in (
            ("sequence-parallel all-to-all", shards, layout.tensor_parallel_size,
             hidden * heads * model.head_size / model.hidden_size, 2 * counts.blocks, 2 * counts.again_blocks),
            ("expert all-to-all", layout.expert_parallel_size, 1, hidden * model.experts_per_token,
             2 * counts.moe_blocks, 2 * counts.again_moe_blocks)):
        for phase, number in (("forward", count), ("backward", count + again)):
            messages = number * layout.gradient_accumulation_steps
            transfers.append(Transfer(what, "network", phase, messages * size * (ranks - 1) / ranks, ranks, stride,
                                      messages=messages))
    return transfers


def _tensor_parallel(layout: Layout, model: ModelConfig, counts: _Counts, hidden: float) -> list[Transfer]:
    """Collectives of the layers whose matrices ranks share (model/layers/linear.py; arXiv 2205.05198, section 4.2.2).

    The backward pass gathers and sums the gradients. It also gathers the inputs again, while it computes another
    product. Embedding and head are two such products, too; a rank of a pipeline has at most one of them. Each layer
    sums the gradients of the parameters that all ranks have, such as norms.

    Args:
        hidden: bytes of a rank's shard of the hidden states.
    """
    ranks, steps = layout.tensor_parallel_size, layout.gradient_accumulation_steps
    end = 1 if layout.pipeline_stages == 1 else 0.5  # of the pair of embedding and head
    inputs, outputs = counts.inputs + end, counts.outputs + end
    complete, layers = _complete_parameters(model, *_largest_stage(layout, model))
    norms = Transfer("tensor-parallel norms: all-reduce", "network", "backward",
                     2 * (ranks - 1) / ranks * complete * layout.element_bytes * steps, ranks, messages=layers * steps)
    return [norms, *(Transfer(f"tensor-parallel {what}", "network", phase, count * steps * hidden * (ranks - 1), ranks,
                     overlaps=overlaps, messages=count * steps) for what, phase, count, overlaps in (
        ("inputs: all-gather", "forward", inputs, False),
        ("outputs: reduce-scatter", "forward", outputs, False),
        ("gradients: all-gather", "backward", outputs, False),
        ("gradients: reduce-scatter", "backward", inputs, False),
        ("inputs: all-gather", "backward", counts.again_inputs, not layout.recomputation.is_on),
        ("recomputed outputs: reduce-scatter", "backward", counts.again_outputs, False)))]


def _largest_stage(layout: Layout, model: ModelConfig) -> tuple[int, int]:
    """Return the first block of the pipeline stage that has most blocks, and the end of its blocks."""
    before = next(index for index, layer in enumerate(model.layers()) if layer.kind == "block")
    bounds = [min(max(bound - before, 0), model.num_layers) for bound in pipeline_stage_bounds(model, layout)]
    return max(pairwise(bounds), key=lambda stage: stage[1] - stage[0])


@lru_cache(maxsize=64)
def _complete_parameters(model: ModelConfig, start: int, stop: int) -> tuple[int, int]:
    """Return the elements that each tensor-parallel rank has of some blocks and the layers around all, and the layers.

    Which pipeline stage has the other layers is ignored.
    """
    others = [layer for layer in model.layers() if layer.kind != "block"]
    sizes = [sum(each.size for each in layer.parameters if each.split_dim is None and not each.is_expert)
             for layer in (*others, *model.blocks()[start:stop])]
    return sum(sizes), sum(size > 0 for size in sizes)


@lru_cache(maxsize=64)
def _counts(recompute: Recompute, model: ModelConfig, start: int, stop: int) -> _Counts:
    """Count the collectives of the blocks `start` to `stop`.

    A part that is recomputed keeps its gathered input until its backward pass. Recomputation ends before the last sum,
    unless a later operator needs it.
    """
    counts = _Counts()
    for index, layer in enumerate(model.blocks()[start:stop], start):
        mlp = 0 if layer.has_experts and not model.shared_expert_size else 1  # an MLP whose matrices are shared
        part, tiles = recompute.part_of(index), recompute.mlp_tiles
        is_complete = part == "blocks" or recompute.interval > 0
        shared = mlp if model.shared_norm and part in ("none", "blocks") and tiles == 1 else 0
        counts.blocks += 1
        counts.moe_blocks += layer.has_experts
        counts.again_blocks += is_complete or part == "attention"
        counts.again_moe_blocks += layer.has_experts and (is_complete or part == "mlp")
        counts.inputs += 1 + mlp - shared
        counts.outputs += 1 + mlp
        # a group of layers gathers twice: when it is recomputed, and in the backward pass
        counts.again_inputs += (1 + mlp - shared) * (2 if recompute.interval else 1)
        sum_is_needed = model.post_norm or (layer.has_experts and model.shared_expert_gate)
        if is_complete:
            last = 0 if sum_is_needed or model.residual_dropout else mlp / tiles
            counts.again_outputs += 1 + mlp - last / (recompute.interval or 1)
            if not recompute.interval:
                counts.again_inputs += mlp * (1 - 1 / tiles)  # all tiles but the last one are recomputed twice
        elif part != "none":
            counts.again_outputs += model.post_norm if part == "attention" else mlp * sum_is_needed
    return counts
