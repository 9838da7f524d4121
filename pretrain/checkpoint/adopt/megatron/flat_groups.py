"""Read single parameters out of the flat vectors in which ZeRO stage 1 keeps master weights and optimizer states.

A parameter group is one vector: the group's parameters one after the other, in the order of `param_shapes` in the file
mp_rank_MM_model_states.pt, then padding. Data-parallel ranks divide it into partitions of equal length. DeepSpeed saves
it in two forms (0.19.8): runtime/zero/stage_1_and_2.py removes the padding of the master weights, and
runtime/bf16_optimizer.py does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.adopt.megatron.layer_files import load
from pretrain.errors import ConfigError

MASTERS = "fp32"


@dataclass(frozen=True)
class FlatGroup:
    """A parameter group of one mp rank, with the partitions of all its data-parallel ranks."""

    path: Path  # of the first partition, for errors
    shapes: Mapping[str, tuple[int, ...]]  # in the order of the vector
    starts: Mapping[str, int]  # first element of each parameter
    partitions: Mapping[str, Sequence[torch.Tensor]]  # state -> partition of each rank, memory-mapped
    settings: Mapping[str, Any]  # of the optimizer: "lr", "betas", "eps", "weight_decay"
    step: float  # the optimizer's own count

    @property
    def states(self) -> tuple[str, ...]:
        """States of the optimizer with a number for each weight."""
        return tuple(sorted({*self.partitions} - {MASTERS}))

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a parameter's values of one state, in fp32 and in the parameter's shape."""
        shape, start = self.shapes[name], self.starts[name]
        stop, size = start + prod(shape), len(self.partitions[state][0])
        pieces = [part[max(0, start - index * size): max(0, stop - index * size)]
                  for index, part in enumerate(self.partitions[state])]
        return torch.cat(pieces).float().view(shape)


def read_groups(paths: Sequence[Path], param_shapes: Any, where: Path) -> list[FlatGroup]:
    """Return the groups of one mp rank. Raises ConfigError.

    Args:
        paths: the ZeRO files of its data-parallel ranks.
        param_shapes: of its model-states file: for each group, name -> shape.
        where: that file.
    """
    if not isinstance(param_shapes, list) or not all(isinstance(group, dict) for group in param_shapes):
        raise ConfigError(f"{where}: param_shapes", found=f"a {type(param_shapes).__name__}",
                          expected="a list with a dict for each parameter group",
                          remedy="use a checkpoint of DeepSpeed 0.5.9 or later")
    states = [_optimizer_state(path) for path in paths]
    counts = {len(state["single_partition_of_fp32_groups"]) for state in states}
    if counts != {len(param_shapes)}:
        raise ConfigError(f"{paths[0]}: single_partition_of_fp32_groups", found=f"{sorted(counts)} parameter groups",
                          expected=f"{len(param_shapes)}, as in {where.name}")
    return [_read_group(paths[0], states, index, shapes) for index, shapes in enumerate(param_shapes)]


def _optimizer_state(path: Path) -> dict[str, Any]:
    content = load(path)
    found = content.get("optimizer_state_dict")
    state: dict[str, Any] = found if isinstance(found, dict) else {}
    for key in ("single_partition_of_fp32_groups", "base_optimizer_state"):
        if key not in state:
            raise ConfigError(f"{path}: optimizer_state_dict", found=f"no {key}",
                              expected="the state of a ZeRO optimizer of stage 1, as DeepSpeed writes")
    zero = content.get("ds_config", {}).get("zero_optimization", {})
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        raise ConfigError(f"{path}: zero_optimization.round_robin_gradients", found=True, expected="false",
                          remedy="the order of the parameters is not recorded with it: save with DeepSpeed's "
                          "ds_to_universal.py, and import that folder")
    if any(any(paddings) for paddings in state.get("param_alignment_paddings") or () if isinstance(paddings, list)):
        raise ConfigError(f"{path}: param_alignment_paddings", found="padding between parameters", expected="none",
                          remedy="save with DeepSpeed's ds_to_universal.py, and import that folder")
    return state


def _read_group(path: Path, states: Sequence[dict[str, Any]], index: int, shapes: Mapping[str, Any]) -> FlatGroup:
    sizes = {name: tuple(shape) for name, shape in shapes.items()}
    starts, total = {}, 0
    for name, shape in sizes.items():
        starts[name] = total
        total += prod(shape)
    per_rank = [_base_states(path, state["base_optimizer_state"], index) for state in states]
    partitions = {MASTERS: [state["single_partition_of_fp32_groups"][index] for state in states]}
    settings, first = per_rank[0]
    for key in (key for key, value in first.items() if isinstance(value, torch.Tensor) and value.dim() == 1):
        partitions[key] = [values.get(key) for _, values in per_rank]
    for key, parts in partitions.items():
        _check_partitions(f"{path}: {key} of parameter group {index}", parts, total)
    step = first.get("step", settings.get("step", 0))
    return FlatGroup(path, sizes, starts, partitions, settings, float(step))


def _base_states(path: Path, base: Any, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a group in the base optimizer, and its states.

    With zero_optimization.elastic_checkpoint, the base optimizer's state is a list without settings.
    """
    try:
        if isinstance(base, list):
            return {}, dict(base[index])
        settings = base["param_groups"][index]
        (number,) = settings["params"]
        return dict(settings), dict(base["state"].get(number, {}))
    except (KeyError, IndexError, TypeError, ValueError):
        raise ConfigError(f"{path}: base_optimizer_state", problem="it is not the state of a torch optimizer with one "
                          f"flat parameter in group {index}") from None


def _check_partitions(where: str, parts: Sequence[Any], total: int) -> None:
    """Raise ConfigError unless the partitions are vectors of one length, the last may be shorter, and hold `total`."""
    if not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in parts):
        raise ConfigError(where, found="something else", expected="one vector for each data-parallel rank")
    sizes = [len(part) for part in parts]
    equal = all(size == sizes[0] for size in sizes[:-1]) and sizes[-1] <= sizes[0]
    if not equal or sum(sizes) < total:
        raise ConfigError(where, found=f"partitions of {', '.join(map(str, sizes))} elements",
                          expected=f"equal ones, together at least {total}", remedy="use another checkpoint")
