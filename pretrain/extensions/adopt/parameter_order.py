"""Name the parameters of an optimizer whose file has only their order.

An optimizer's groups list parameters in the order of the model, as any comprehension over `named_parameters()` does.
With several groups, the file does not say which group has which parameter. It follows from the shapes if no shape is in
two groups, and otherwise from the values, where the file has fp32 copies of 16-bit weights. Without either, the file is
rejected.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pretrain.errors import ConfigError

Shape = tuple[int, ...]
_REMEDY = ("continue the run with ZeRO stage 1, 2 or 3 for a step, whose files have the names, or import the weights "
           "alone")


def is_rounded(master: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether weights are the fp32 values, rounded to their dtype."""
    return torch.equal(torch.nan_to_num(master.reshape(weights.shape).to(weights.dtype)), torch.nan_to_num(weights))


def names_by_values(where: str, flats: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of the parameters in each flat fp32 group.

    Args:
        where: the file, for messages.
        weights: all parameters in the model's order, in the dtype in which the model has them.

    Raises ConfigError unless each parameter continues exactly one group.
    """
    names: list[list[str]] = [[] for _ in flats]
    ends = [0] * len(flats)
    for name, tensor in weights.items():
        fitting = [i for i, flat in enumerate(flats) if ends[i] + tensor.numel() <= flat.numel()
                   and is_rounded(flat.view(-1)[ends[i]:ends[i] + tensor.numel()], tensor)]
        if len(fitting) != 1:
            problem = "its weights are in no group of the optimizer, or in another order" if not fitting else \
                "its weights are at the next place of several groups of the optimizer"
            raise ConfigError(f"{where}: {name}", problem=problem, remedy=_REMEDY)
        names[fitting[0]].append(name)
        ends[fitting[0]] += tensor.numel()
    if ends != [flat.numel() for flat in flats]:
        raise ConfigError(where, problem="the optimizer has more weights than the module", remedy=_REMEDY)
    return names


def names_by_shape(where: str, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Mapping[str, Any]],
                   weights: Mapping[str, torch.Tensor],
                   masters: Sequence[Sequence[torch.Tensor]] | None) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer that keeps them apart.

    Args:
        where: the file, for messages.
        groups: param_groups of the state_dict. torch from 2.6 on may list `param_names`.
        state: its state, by the numbers in `groups`.
        weights: all parameters in the model's order.
        masters: fp32 weights of each group, if the optimizer has them.

    Raises ConfigError if the names do not follow from the order and the shapes.
    """
    counts = [len(group["params"]) for group in groups]
    if sum(counts) != len(weights):
        raise ConfigError(where, found=f"{sum(counts)} parameters in the optimizer",
                          expected=f"{len(weights)}, as in the module", remedy=_REMEDY)
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    if len(groups) == 1:
        names = [list(weights)]
        _check_shapes(where, groups, state, weights, names)
        return names
    return _divided(where, groups, state, weights, masters)


def _shape_of(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the first state with a number for each weight; None: there is none."""
    return next((tuple(value.shape) for value in state.values() if torch.is_tensor(value) and value.dim() > 0), None)


def _check_shapes(where: str, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Mapping[str, Any]],
                  weights: Mapping[str, torch.Tensor], names: list[list[str]]) -> None:
    for group, of_group in zip(groups, names, strict=True):
        for index, name in zip(group["params"], of_group, strict=True):
            found = _shape_of(state.get(index, {}))
            if state and found != tuple(weights[name].shape):
                raise ConfigError(f"{where}: {name}", found=f"the shape {list(found or ())} of parameter {index} of "
                                  "the optimizer", expected=f"{list(weights[name].shape)}, as in the module",
                                  remedy=_REMEDY)


def _divided(where: str, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Mapping[str, Any]],
             weights: Mapping[str, torch.Tensor], masters: Sequence[Sequence[torch.Tensor]] | None) -> list[list[str]]:
    """Return the names of several groups: by their shapes or, if a shape is in two groups, by their values."""
    if not state:
        raise ConfigError(where, problem="the optimizer has no states yet", remedy="import the weights alone")
    shapes = [[_shape_of(state.get(index, {})) for index in group["params"]] for group in groups]
    owner: dict[Shape | None, int] = {}
    ambiguous = {shape for number, of_group in enumerate(shapes) for shape in of_group
                 if owner.setdefault(shape, number) != number}
    if ambiguous and masters is None:
        shape = next(iter(ambiguous))
        raise ConfigError(where, problem=f"several parameter groups of the optimizer have parameters of the shape "
                          f"{list(shape or ())}, and the file has no names", remedy=_REMEDY)
    names: list[list[str]] = []
    unused = dict(weights)
    for number, of_group in enumerate(shapes):
        names.append([])
        for position, shape in enumerate(of_group):
            name = next((name for name, tensor in unused.items() if tuple(tensor.shape) == shape and (
                masters is None or shape not in ambiguous or is_rounded(masters[number][position], tensor))), None)
            if name is None:
                raise ConfigError(where, problem=f"parameter {position} of group {number} of the optimizer has the "
                                  f"shape {list(shape or ())} or values that no remaining parameter has",
                                  remedy=_REMEDY)
            del unused[name]
            names[-1].append(name)
    order = {name: index for index, name in enumerate(weights)}
    if any([order[name] for name in of_group] != sorted(order[name] for name in of_group) for of_group in names):
        raise ConfigError(where, problem="the optimizer's groups do not list the parameters in the order of the model",
                          remedy=_REMEDY)
    return names
