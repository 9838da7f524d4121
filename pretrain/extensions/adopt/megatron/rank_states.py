"""Read master weights and optimizer states of each mp rank, in the names of its layers.

With ZeRO stage 1 they are in zero_pp_rank files. Without it, the file of each mp rank has those of its pipeline stage:
in fp32 the optimizer is torch's, in fp16 each parameter group is one flat vector (DeepSpeed 0.19.8,
runtime/fp16/fused_optimizer.py), and in bf16 DeepSpeed writes ZeRO files. These parameters have no names: they follow
from the order of the layers, and from shapes or values.

To DeepSpeed, the files of one mp rank are a checkpoint of an engine without model parallelism, and are read as such.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.shard_index import FP32
from pretrain.errors import ConfigError
from pretrain.extensions.adopt.deepspeed.engine_files import EngineFiles, param_groups
from pretrain.extensions.adopt.deepspeed.zero_files import ForeignReader
from pretrain.extensions.adopt.deepspeed.zero_layout import FoundParameters, find_parameters
from pretrain.extensions.adopt.foreign_run import understood
from pretrain.extensions.adopt.megatron.layer_files import LayerFiles, load
from pretrain.extensions.adopt.megatron.names import PeerLayout

Weights = dict[str, torch.Tensor]  # of one pipeline stage and tensor-parallel rank, by names such as 2.mlp.linear1.bias
Layers = Mapping[int, Sequence[Mapping[str, torch.Tensor]]]  # as `load_layers` returns them
_OTHER = "use a checkpoint with ZeRO stage 1, or adopt the weights alone: remove the key optimizer"


@dataclass(frozen=True)
class RankStates:
    """Master weights and optimizer states of one mp rank. Raises ConfigError unless all sizes agree."""

    files: EngineFiles

    @cached_property
    def found(self) -> FoundParameters:
        """The fragments of each parameter."""
        with understood(self.path):
            return find_parameters(self.files)

    @cached_property
    def _reader(self) -> ForeignReader:
        return ForeignReader(self.files, self.found)

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.files.folder / (self.files.optimizer_files or self.files.model_files)[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return self.found.stored.shapes

    @property
    def states(self) -> tuple[str, ...]:
        """States of the optimizer with a number for each weight."""
        return tuple(sorted({*self.found.stored.states} - {FP32}))

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's parameter groups; none with zero_optimization.elastic_checkpoint."""
        return param_groups(self.files)

    @property
    def step(self) -> float:
        """The optimizer's own count of steps."""
        counts = (group["step"] for group in self.groups if "step" in group)
        return max(map(float, (self.found.stored.scalars.get("step", 0), *counts)))

    def group(self, name: str) -> Mapping[str, Any]:
        """Return the settings of the optimizer for a parameter."""
        return self.found.stored.fragments[name][0].group

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a parameter's values of one state, in fp32 and in the parameter's shape."""
        return self._reader.tensor(name, state)


def read_ranks(files: LayerFiles, layers: Layers, layout: PeerLayout) -> tuple[RankStates, ...]:
    """Return the states of each mp rank; () if the files have no optimizer. Raises ConfigError."""
    contents = [load(path) for path in files.mp_ranks]
    if files.zero:
        return tuple(RankStates(_partitioned(files.folder, path, content, paths))
                     for path, content, paths in zip(files.mp_ranks, contents, files.zero, strict=True))
    ranks, optimizers = files.tensor_parallel_size, [content.get("optimizer") for content in contents]
    if not all(isinstance(optimizer, dict) for optimizer in optimizers):
        return ()
    found = []
    for rank, (path, content) in enumerate(zip(files.mp_ranks, contents, strict=True)):
        with understood(path):
            stages = _weights_of_stages(files, layers, layout, optimizers[rank % ranks::ranks], rank % ranks)
        model = {**content, "module": stages[rank // ranks]}
        found.append(RankStates(EngineFiles(files.folder, model, (path.name,), (), {path.name: model})))
    return tuple(found)


def _partitioned(folder: Path, path: Path, content: dict[str, Any], paths: Sequence[Path]) -> EngineFiles:
    """Return the files of one mp rank with ZeRO stage 1. Weights of the module are not its optimizer's."""
    model = {"param_shapes": None, **content, "module": {}}
    return EngineFiles(folder, model, (path.name,), tuple(each.name for each in paths),
                       {path.name: model, **{each.name: load(each) for each in paths}}, stage=1)


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
