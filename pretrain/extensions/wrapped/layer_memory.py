"""Memory of layers that transformers computes: measured on fake tensors, not derived from formulas.

A layer runs once forward and backward, with the shapes of the micro-batch and without memory. A StorageTracker counts
what the forward pass keeps, and the peak of both passes; that of the backward pass includes the gradient of one
parameter, before it is added. The operators are those of a CPU: on CUDA other kernels may keep other tensors. Layers
with equal parameters, arguments and widths of inputs and outputs are measured once.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.implementation import LayerBytes
from pretrain.model.operator_memory import FP32, MicroBatch

if TYPE_CHECKING:
    import torch

    from pretrain.extensions.wrapped.decoder import Decoder
    from pretrain.memory.storage_tracker import StorageTracker


@dataclass(frozen=True)
class MeasuredBytes:
    """Memory of all layers of a model for one micro-batch in bytes."""

    layers: dict[Layer, LayerBytes]
    arguments: int  # masks and rotary tables, which all blocks share


@lru_cache(maxsize=64)
def measured_bytes(config: ModelConfig, decoder: "Decoder", batch: MicroBatch) -> MeasuredBytes:
    """Measure all layers of a wrapped model. Raises ConfigError if one of them cannot be computed without values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pretrain.extensions.wrapped.modules import wrapped_specs
    from pretrain.extensions.wrapped.runner import width_at
    from pretrain.memory.storage_tracker import StorageTracker
    from pretrain.model.parameters import DTYPES
    from pretrain.model.recompute import Recompute

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # its errors are raised as well
    specs = wrapped_specs(config, decoder, ends_in_loss=False, loss=None, recompute=Recompute())
    dtype = DTYPES["fp32" if batch.element_bytes == FP32 else "fp16" if batch.fp16 else "bf16"]
    # real masks and tables: transformers makes other ones of fake tensors (utils/import_utils.py, is_tracing)
    tokens_BT = torch.zeros(batch.samples, batch.seq_length, dtype=torch.int64)
    arguments = [_tensors_in(decoder.arguments(index, tokens_BT, dtype)) for index in range(config.num_layers)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _grouped_products(), StorageTracker() as tracker:
        fakes = [mode.from_tensor(tensor) for own in arguments for tensor in own]  # the operators get these, too
        for fake in fakes:
            tracker.add(fake)
        try:
            given = [(own, width_at(decoder.parts.carried, index + 1)) for index, own in enumerate(arguments)]
            layers = _measure_layers(config, specs, mode.from_tensor(tokens_BT), given, dtype, tracker)
        except Exception as error:  # transformers' modules raise many classes where a shape depends on values
            raise ConfigError(f"model_type {config.architecture}", problem="the memory of its activations cannot be "
                              f"predicted ({type(error).__name__}: {str(error).splitlines()[0]:.100})",
                              remedy="--measure trains real steps") from None
    storages = [tensor.untyped_storage() for own in arguments for tensor in own]
    return MeasuredBytes(layers, sum({storage._cdata: storage.nbytes() for storage in storages}.values()))


def _grouped_products() -> Any:
    """Return a mode that gives products of experts in any dtype: fake tensors have them in bf16 alone (torch 2.13)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class GroupedProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name() != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
                return func(*args, **(kwargs or {}))
            a, b, ends = args[:3]
            shape = [a.shape[-2], b.shape[-1]]
            if a.dim() == b.dim():  # one matrix of each expert
                shape.insert(0, a.shape[0] if a.dim() == 3 else ends.numel())
            return a.new_empty(shape)

    return GroupedProducts()


def _measure_layers(config: ModelConfig, specs: Sequence[Any], x: "torch.Tensor",
                    given: Iterable[tuple[list["torch.Tensor"], int]], dtype: "torch.dtype",
                    tracker: "StorageTracker") -> dict[Layer, LayerBytes]:
    """Measure all layers. `given`: the arguments of each block, and the elements that its output carries."""
    import torch

    labels = torch.zeros_like(x), torch.zeros(x.shape)
    found: dict[tuple[Any, ...], tuple[LayerBytes, torch.Tensor]] = {}
    layers: dict[Layer, LayerBytes] = {}
    of_blocks = iter(given)
    for layer, spec in zip(config.layers(), specs, strict=True):
        own, width = next(of_blocks) if layer.kind == "block" else ([], 0)
        key = (layer.kind, layer.class_name, *((each.name, each.shape) for each in layer.parameters), *map(id, own),
               x.shape, width)
        if key not in found:
            torch.set_default_dtype(dtype)  # not .to(dtype): the parameters of fake tensors cannot be swapped
            try:
                module = spec.build()
            finally:
                torch.set_default_dtype(torch.float32)
            forward = partial(spec.forward_fn, module) if getattr(spec, "forward_fn", None) is not None else module
            if layer.kind == "head":
                forward = partial(forward, labels=labels)
            found[key] = _measure(tracker, list(module.parameters()), forward, x)
        layers[layer], x = found[key]
    return layers


def _tensors_in(values: Any) -> list["torch.Tensor"]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _measure(tracker: "StorageTracker", parameters: Sequence["torch.Tensor"], forward: Any,
             given: "torch.Tensor") -> tuple[LayerBytes, "torch.Tensor"]:
    """Run a layer forward and backward. Return its memory, and its output without a graph."""
    import torch

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    x = given.detach()
    if x.is_floating_point():
        x = x.requires_grad_() * 1  # the tensor of another layer, which is freed if nothing keeps it
    key, input_bytes = x.untyped_storage()._cdata, x.nbytes
    before = tracker.live_bytes - input_bytes
    tracker.reset_peak()
    y = forward(x)
    forward_peak = tracker.peak_bytes - before - input_bytes - y.nbytes
    del x
    saved_input = input_bytes if key in tracker.sizes else 0
    before += y.nbytes
    saved = tracker.live_bytes - before
    tracker.reset_peak()
    y.backward(torch.ones_like(y))
    return LayerBytes(saved, saved_input, forward_peak, tracker.peak_bytes - before - saved), y.detach()
