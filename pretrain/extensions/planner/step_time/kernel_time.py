"""Seconds that one device computes for one micro-batch, layer by layer: matrix products, attention, memory passes.

Shapes in docstrings: M tokens of the micro-batch, N and K columns and rows of a weight, D hidden_size, V vocab_size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pretrain.config.layout import Layout
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from pretrain.memory.hardware import Cluster, Gpu
from pretrain.model.description import Layer, ModelConfig, Parameter
from pretrain.model.flops import mean_keys_seen
from pretrain.model.partition import BY_TIME
from pretrain.model.recomputed_flops import recomputed_fraction

# A product is computed in tiles, one per multiprocessor at a time; the last wave of tiles may leave most of them idle
# (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization). The smaller a tile, the more
# often it reads its inputs: fraction of the rate of the largest tile, by (rows, columns).
_TILES = {(256, 128): 1.0, (128, 128): 0.9, (128, 64): 0.8}
# Seconds from the start of a tile to its first product, and from the last product to the end of its write: about two
# round trips to device memory and the write itself. An assumption.
_TILE_OVERHEAD = 4e-6
_ATTENTION_BACKWARD = 2.5  # FLOPs of five products instead of two: FlashAttention recomputes the scores
# Bytes of device memory for each logit, beyond the product that writes it: one kernel for softmax and loss reads the
# logits and writes their gradients; the two products of the backward pass are counted by themselves.
_LOSS_BYTES = 10
# Elements of device memory for each element of a gradient, in each micro-batch: it is copied into a bucket (2), read
# and written by the collective (2), and added to the sum (1).
_GRADIENT_PASSES = 5
_NOTE = 'pipeline.partition_method "time": a run measures its layers; here their times are predicted'
_BACKWARD_KERNELS = 1.5  # for each kernel of the forward pass: measured like the hooks of ZeRO in time_model.py


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch on one device, and the number of kernels."""

    forward: float
    backward: float
    forward_kernels: float
    backward_kernels: float


@dataclass(frozen=True)
class KernelRates:
    """The device, the precision and the parameters that determine the rates of kernels."""

    gpu: Gpu
    precision: str
    element_bytes: int
    parameters: TimeParameters

    @property
    def memory(self) -> float:
        """Bytes per second."""
        return self.gpu.memory_rate * self.parameters.memory_efficiency * self.parameters.compute_speed

    def product_seconds(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product of [m, k] and [k, n], limited by FLOPs or by bytes (roofline)."""
        peak = self.gpu.peak_flops(self.precision) * self.gpu.product_efficiency
        rate = peak * _tile_efficiency(m, n, k, peak, self.gpu.multiprocessors) if self.gpu.kind == "cuda" else peak
        size = (m * n + n * k + m * k) * self.element_bytes
        return max(2 * m * n * k / (rate * self.parameters.compute_speed), size / self.memory)

    def attention_seconds(self, queries: float, keys: float, heads: float, head_size: int) -> float:
        """Return the seconds of the forward pass. `keys`: mean number that a query sees."""
        flops = 2 * 2 * queries * keys * heads * head_size
        peak = self.gpu.peak_flops(self.precision) * self.gpu.attention_efficiency
        speed = self.parameters.attention_speed * self.parameters.compute_speed
        return flops / (peak * speed * keys / (keys + self.parameters.attention_half_keys))


@lru_cache(maxsize=4096)
def _tile_efficiency(m: float, n: float, k: float, peak: float, multiprocessors: int) -> float:
    """Return the fraction of the rate of large products, with the best of the tiles."""
    best = 0.0
    for tile, speed in _TILES.items():
        overhead = _TILE_OVERHEAD * peak / multiprocessors / (2 * tile[0] * tile[1])  # in units of k
        for rows, columns in (tile, tile[::-1]):
            tiles = math.ceil(m / rows) * math.ceil(n / columns)
            waves = math.ceil(tiles / multiprocessors)
            used = m * n / (rows * columns * waves * multiprocessors)
            best = max(best, speed * used * k / (k + overhead))
    return best


@lru_cache(maxsize=4096)
def layer_time(layer: Layer, model: ModelConfig, layout: Layout, rates: KernelRates) -> LayerTime:
    """Return the time of one layer of a rank for one micro-batch, without recomputation.

    Args:
        layout: a result of `_of_kernels`, because layouts that differ in other fields have the same times.
    """
    tokens = layout.micro_batch_size * layout.seq_length / layout.sequence_parallel_size
    forward, backward, products = _products(layer, model, layout, rates, tokens)
    passes, kernels = _memory_passes(layer, model, layout)
    bytes_per_token = [elements * rates.element_bytes for elements in passes]
    if layer.kind == "head":
        bytes_per_token[1] += _LOSS_BYTES * model.vocab_size / layout.tensor_parallel_size
        kernels += 2
    elif layer.kind == "block":
        heads = model.num_heads / layout.tensor_parallel_size / layout.sequence_parallel_size
        queries = layout.micro_batch_size * layout.seq_length
        keys = mean_keys_seen(layer.window, layout.seq_length)
        attention = rates.attention_seconds(queries, keys, heads, model.head_size)
        forward, backward = forward + attention, backward + _ATTENTION_BACKWARD * attention
        kernels += 4  # the kernel itself, and views of queries, keys and values that are copied
    gradients = 0.0 if layer.kind == "head" and layer.tied else _elements(layer, layout)
    backward += _GRADIENT_PASSES * gradients * rates.element_bytes / rates.memory
    return LayerTime(forward + tokens * bytes_per_token[0] / rates.memory,
                     backward + tokens * bytes_per_token[1] / rates.memory,
                     products + kernels, _BACKWARD_KERNELS * (products + kernels))


def layer_times(layers: Sequence[Layer], model: ModelConfig, layout: Layout, cluster: Cluster,
                parameters: TimeParameters) -> list[LayerTime]:
    """Return the time of each of some layers, as `layer_time` does."""
    rates = KernelRates(cluster.gpu, layout.precision, layout.element_bytes, parameters)
    known = {id(layer): layer for layer in layers}  # equal blocks are one object
    own = _of_kernels(layout)
    times = {key: layer_time(layer, model, own, rates) for key, layer in known.items()}
    return [times[id(layer)] for layer in layers]


def _of_kernels(layout: Layout) -> Layout:
    """Return a layout with only those fields that determine the shapes in a micro-batch of a rank."""
    tensor, sequence, expert = (layout.tensor_parallel_size, layout.sequence_parallel_size, layout.expert_parallel_size)
    return Layout(world_size=tensor * sequence * expert, tensor_parallel_size=tensor, sequence_parallel_size=sequence,
                  expert_parallel_size=expert, micro_batch_size=layout.micro_batch_size, seq_length=layout.seq_length)


def _elements(layer: Layer, layout: Layout) -> float:
    return sum(math.prod(_local_shape(parameter, layout)) for parameter in layer.parameters)


def _local_shape(parameter: Parameter, layout: Layout) -> tuple[float, ...]:
    """Return a parameter's shape on one rank, after tensor and expert parallelism."""
    sizes: list[float] = list(parameter.shape)
    if parameter.is_expert:
        sizes[0] /= layout.expert_parallel_size
    if parameter.split_dim is not None:
        sizes[parameter.split_dim] /= layout.tensor_parallel_size
    return tuple(sizes)


def _products(layer: Layer, model: ModelConfig, layout: Layout, rates: KernelRates,
              tokens: float) -> tuple[float, float, int]:
    """Return (forward seconds, backward seconds, number) of the products with the layer's matrices."""
    forward, backward, number = 0.0, 0.0, 0
    if layer.kind not in ("block", "head"):
        return forward, backward, number
    for parameter in layer.parameters:
        if not parameter.is_matrix:
            continue
        *experts, n, k = _local_shape(parameter, layout)
        count, m = 1.0, tokens
        if experts and parameter.active_size == parameter.size:
            continue  # a convolution of transformers' layers
        if experts:  # each token passes some of them, all on some rank; a rank routes its shard of the sequences
            count = experts[0]
            m = tokens * layout.expert_parallel_size / layout.tensor_parallel_size
            m *= parameter.active_size / parameter.size
        forward += count * rates.product_seconds(m, n, k)
        backward += count * (rates.product_seconds(m, k, n) + rates.product_seconds(n, k, m))
        number += 1
    return forward, backward, number


def _memory_passes(layer: Layer, model: ModelConfig, layout: Layout) -> tuple[tuple[float, float], int]:
    """Return the elements per token that (forward, backward) read and write outside of products, and the kernels.

    A norm: 2 D, backward 4 D. A residual addition: 3 D both ways. An activation of I elements: 2 I, or 3 I with a gate;
    backward one more. Rotary positions: read and write queries and keys. Gradients of biases: their outputs once.
    """
    hidden = float(model.hidden_size)
    if layer.kind in ("embedding", "positions"):
        return (2 * hidden, 3 * hidden), 1
    norms = sum(each.name.endswith(".weight") and not each.is_matrix for each in layer.parameters)
    if layer.kind != "block":
        return (2 * hidden * norms, 4 * hidden * norms), norms
    biases = sum(each.size for each in layer.parameters if _is_bias_of_matrix(each, layer))
    inner: float = model.intermediate_size
    if layer.has_experts:
        inner = model.moe_intermediate_size * model.experts_per_token + model.shared_expert_size
    inner /= layout.tensor_parallel_size
    rotated = 0.0
    if model.position == "rope":
        rotated = 2.0 * (model.num_heads + model.num_kv_heads) * model.head_size / layout.tensor_parallel_size
    gate = 1 if model.gated_mlp else 0
    dropout = 2.5 * 2 * hidden if model.residual_dropout else 0.0  # input, output, and a mask of one byte
    forward = 2 * hidden * norms + 6 * hidden + (2 + gate) * inner + rotated + dropout
    backward = 4 * hidden * norms + 6 * hidden + (3 + 2 * gate) * inner + rotated + dropout + biases
    return (forward, backward), norms + 3 + gate + (6 if rotated else 0) + (2 if dropout else 0)


def _is_bias_of_matrix(parameter: Parameter, layer: Layer) -> bool:
    module, _, kind = parameter.name.rpartition(".")
    return kind == "bias" and layer.by_name()[f"{module}.weight"].is_matrix


def with_predicted_times(layout: Layout, model: ModelConfig, cluster: Cluster) -> Layout:
    """Return the layout with predicted times of its layers if its pipeline stages depend on them."""
    if layout.partition_method != BY_TIME or layout.pipeline_stages == 1 or layout.layer_times:
        return layout
    again = recomputed_fraction(model, layout.recomputation, layout.seq_length)  # of the mean block
    times = layer_times(model.layers(), model, layout, cluster, DEFAULT_PARAMETERS)
    nanoseconds = tuple(round(1e9 * (time.forward + time.backward + (again * time.forward if layer.kind == "block"
                                                                     else 0.0)))
                        for layer, time in zip(model.layers(), times, strict=True))
    return replace(layout, layer_times=nanoseconds, notes=(*layout.notes, _NOTE))
