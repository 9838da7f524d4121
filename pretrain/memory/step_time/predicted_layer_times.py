"""Predicted times of layers, where the run that would measure them (engine/layer_times.py) has not started."""

from dataclasses import replace

from pretrain.config.layout import Layout
from pretrain.memory.hardware import Cluster
from pretrain.memory.step_time.kernel_time import KernelRates, layer_time
from pretrain.memory.step_time.recomputed_work import recomputed_fraction
from pretrain.memory.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.partition import BY_TIME

NOTE = 'pipeline.partition_method "time": a run measures its layers; here their times are predicted'


def with_predicted_times(layout: Layout, shape: ModelConfig | None, cluster: Cluster,
                         parameters: TimeParameters = DEFAULT_PARAMETERS) -> Layout:
    """Return the layout with predicted times of its layers if its pipeline stages depend on them."""
    if layout.partition_method != BY_TIME or layout.pipeline_stages == 1 or layout.layer_times or shape is None:
        return layout
    rates = KernelRates(cluster.gpu, layout.precision, layout.element_bytes, parameters)
    again = recomputed_fraction(layout, shape)
    known: dict[int, int] = {}  # equal blocks are one object
    layers = shape.layers()
    for layer in layers:
        if id(layer) not in known:
            known[id(layer)] = _nanoseconds(layer, shape, layout, rates, again)
    return replace(layout, layer_times=tuple(known[id(layer)] for layer in layers), notes=(*layout.notes, NOTE))


def _nanoseconds(layer: Layer, shape: ModelConfig, layout: Layout, rates: KernelRates, again: float) -> int:
    """Return the time of the forward and backward pass for one micro-batch, with the mean recomputation of a block."""
    time = layer_time(layer, shape, layout, rates)
    return round(1e9 * (time.forward + time.backward + (again * time.forward if layer.kind == "block" else 0.0)))
