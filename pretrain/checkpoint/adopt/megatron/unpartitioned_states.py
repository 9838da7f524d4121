"""Read the optimizer states of a pipeline without ZeRO: the file of each mp rank has those of its pipeline stage.

In fp32, the optimizer is torch's, with states of each parameter; in fp16, each parameter group is one flat vector
(DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py); in bf16, DeepSpeed writes ZeRO files. The parameters have no names:
they follow from the order of the layers, and from shapes or values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.adopt.megatron.flat_groups import MASTERS, FlatGroup
from pretrain.checkpoint.adopt.megatron.layer_files import LayerFiles, load
from pretrain.checkpoint.adopt.megatron.names import PeerLayout
from pretrain.checkpoint.adopt.parameter_order import names_by_shape, names_by_values
from pretrain.errors import ConfigError

Weights = dict[str, torch.Tensor]  # of one pipeline stage and tensor-parallel rank, by names such as 2.mlp.linear1.bias
Layers = Mapping[int, Sequence[Mapping[str, torch.Tensor]]]  # as `load_layers` returns them
_OTHER = "use a checkpoint with ZeRO stage 1, or adopt the weights alone: remove the key optimizer"


@dataclass(frozen=True)
class SeparateGroup:
    """A parameter group of torch's optimizer, with the interface of FlatGroup."""

    path: Path
    weights: Weights
    own: Mapping[str, Mapping[str, torch.Tensor]]  # name -> state -> tensor
    settings: Mapping[str, Any]
    step: float

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    @property
    def states(self) -> tuple[str, ...]:
        """States of the optimizer with a number for each weight."""
        first, weights = next(iter(self.own.values()), {}), next(iter(self.weights.values()))
        return tuple(sorted(key for key, value in first.items() if tuple(value.shape) == tuple(weights.shape)))

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a parameter's values of one state, in fp32."""
        return (self.weights[name] if state == MASTERS else self.own[name][state]).float()


Group = FlatGroup | SeparateGroup


def read_unpartitioned(files: LayerFiles, layers: Layers, layout: PeerLayout) -> tuple[tuple[Group, ...], ...]:
    """Return the parameter groups of each mp rank; () if the files have no optimizer. Raises ConfigError."""
    ranks = files.tensor_parallel_size
    optimizers = [state for path in files.mp_ranks if isinstance(state := load(path).get("optimizer"), dict)]
    if len(optimizers) < len(files.mp_ranks):
        return ()
    found = []
    for rank, (path, state) in enumerate(zip(files.mp_ranks, optimizers, strict=True)):
        stages = _weights_of_stages(files, layers, layout, optimizers[rank % ranks::ranks], rank % ranks)
        is_flat = "fp32_groups_flat" in state
        try:
            found.append(_flat_groups(path, state, stages[rank // ranks]) if is_flat else
                         _separate_groups(path, state, stages[rank // ranks]))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: optimizer", problem="it is neither the state of an optimizer of torch nor of "
                              f"DeepSpeed's FP16_Optimizer ({type(error).__name__}: {error})", remedy=_OTHER) from None
    return tuple(found)


def _weights_of_stages(files: LayerFiles, layers: Layers, layout: PeerLayout, optimizers: Sequence[Any],
                       rank: int) -> list[Weights]:
    """Return the weights of each pipeline stage of a tensor-parallel rank, in the order of the module.

    A stage has whole layers. Which ones follows from the number of parameters, or of weights, in its optimizer.
    """
    count: Callable[[torch.Tensor], int] = lambda tensor: 1  # noqa: E731
    if "fp32_groups_flat" in optimizers[0]:
        count = torch.Tensor.numel
        sizes = [sum(flat.numel() for flat in each["fp32_groups_flat"]) for each in optimizers]
    else:
        sizes = [sum(len(group["params"]) for group in each["param_groups"]) for each in optimizers]
    remaining = sorted(layout.names)
    stages = []
    for stage, size in enumerate(sizes):
        is_copy = stage > 0 and stage == len(sizes) - 1 and layout.head is None
        own: Weights = _weights_of(layers, layout, layout.embedding, rank) if is_copy else {}
        while remaining and sum(map(count, own.values())) < size:
            own |= _weights_of(layers, layout, remaining.pop(0), rank)
        if sum(map(count, own.values())) != size or (stage == len(sizes) - 1 and remaining):
            raise ConfigError(f"{files.mp_ranks[stage * files.tensor_parallel_size + rank]}: optimizer",
                              problem=f"its {size} parameters or weights are not those of whole layers", remedy=_OTHER)
        stages.append(own)
    return stages


def _weights_of(layers: Layers, layout: PeerLayout, index: int, rank: int) -> Weights:
    return {f"{index}.{name}": tensor for name, tensor in layers[index][rank].items() if name in layout.names[index]}


def _flat_groups(path: Path, state: Mapping[str, Any], weights: Weights) -> tuple[Group, ...]:
    flats, base = state["fp32_groups_flat"], state["optimizer_state_dict"]
    groups: list[Group] = []
    for index, names in enumerate(names_by_values(f"{path}: optimizer", flats, weights)):
        shapes = {name: tuple(weights[name].shape) for name in names}
        starts, total = {}, 0
        for name, shape in shapes.items():
            starts[name] = total
            total += prod(shape)
        settings = base["param_groups"][index]
        own = base["state"].get(settings["params"][0], {})
        partitions = {MASTERS: [flats[index]], **{key: [value] for key, value in own.items()
                                                  if isinstance(value, torch.Tensor) and value.dim() == 1}}
        groups.append(FlatGroup(path, shapes, starts, partitions, settings,
                                float(own.get("step", settings.get("step", 0)))))
    return tuple(groups)


def _separate_groups(path: Path, state: Mapping[str, Any], weights: Weights) -> tuple[Group, ...]:
    groups: list[Group] = []
    for settings, names in zip(state["param_groups"], names_by_shape(
            f"{path}: optimizer", state["param_groups"], state["state"], weights, None), strict=True):
        own = {name: state["state"].get(number, {}) for number, name in zip(settings["params"], names, strict=True)}
        step = next(iter(own.values())).get("step", settings.get("step", 0))
        groups.append(SeparateGroup(path, {name: weights[name] for name in names}, own, settings, float(step)))
    return tuple(groups)
