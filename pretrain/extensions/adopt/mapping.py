"""Read values and tensors of a run of another program under this project's names.

Weights and optimizer states follow the same rules. `read_in_module` is the other direction, for sources whose tensors
are similar to ours and not to those of transformers.

Some optimizers have parameters without names. Their groups list parameters in the order of the model, as any
comprehension over `named_parameters()` does. With several groups, the file does not say which group has which
parameter. It follows from the shapes if no shape is in two groups, and otherwise from the values, where the file has
fp32 copies of 16-bit weights. Without either, the file is rejected.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import ForeignRun, Shape
from pretrain.model.config import ModelConfig
from pretrain.model.hf_names import TensorRule, name_in_module, stacked_in_module, tensor_rules
from pretrain.model.hf_weights import module_tensors, to_ours

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # keys of Manifest.loss_scale
_REMEDY = ("continue the run with ZeRO stage 1, 2 or 3 for a step, whose files have the names, or import the weights "
           "alone")


def load_foreign_pickle(path: Path, *, mmap: bool = False, also: Sequence[Any] = ()) -> Any:
    """Load a `torch.save` file of another program, whose size and hash no manifest has. A pipe would wait forever."""
    if path.exists() and not path.is_file():
        raise ConfigError(str(path), problem="this is no regular file", remedy="use another checkpoint")
    return load_pickle(path, mmap=mmap, also=also)


def whole_number(value: Any) -> int | None:
    """Return the value if it is a whole number, otherwise None."""
    return value if type(value) is int else None


def number(value: Any) -> float | None:
    """Return a number, or the number of a tensor with one element; None for other values."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if type(value) in (int, float) else None


def precision_of_dtype(dtype: torch.dtype) -> str:
    """Return "bf16", "fp16" or, for all other dtypes, "fp32"."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def loss_scale_of(scaler: Any) -> dict[str, float] | None:
    """Return the state of fp16's loss scaler, an object or a dict, as in Manifest.loss_scale; None: it has none."""
    get = scaler.get if isinstance(scaler, dict) else lambda name: getattr(scaler, name, None)
    values = {name: number(get(name)) for name in _SCALER}
    return {name: value for name, value in values.items() if value is not None} or None


@dataclass(frozen=True)
class _Place:
    """One of the tensors that hold one of our parameters."""

    name: str  # in the source
    half: int | None = None  # half of a matrix that stacks two: the first (0) or the second half of dimension 1


class OurRun:
    """Gives access to the states of a foreign run by our names of parameters.

    Attributes:
        rules: the rule of each parameter, by our name.
        sources: the names of the source's parameters that hold each of ours.

    Raises ConfigError unless the run has exactly the parameters of its model.
    """

    def __init__(self, run: ForeignRun, config: ModelConfig) -> None:
        self.run, self.config = run, config
        self.rules = {rule.ours: rule for rule in tensor_rules(config)}
        self._places = {name: _places(rule, run, config) for name, rule in self.rules.items()}
        self.sources = {name: tuple(place.name for place in places) for name, places in self._places.items()}
        used = {name for names in self.sources.values() for name in names}
        if unknown := sorted(run.shapes.keys() - used):
            others = f", and {len(unknown) - 1} others" if len(unknown) > 1 else ""
            raise ConfigError(f"{run.folder}: {shorten(unknown[0])}{others}", problem="the model of the config.json "
                              "does not have it", remedy="name the config.json of this run by --model")

    def tensor(self, name: str, state: str) -> torch.Tensor:
        """Return the fp32 values of our parameter, in our shape; only the tensors that it needs are in memory."""
        rule, read = self.rules[name], self.run.read
        tensors = [_part(read(place.name, state), place) for place in self._places[name]]
        for place, tensor in zip(self._places[name], tensors, strict=True):
            if tensor.dtype != torch.float32 or (place.half is None and tuple(tensor.shape) !=
                                                 tuple(self.run.shapes[place.name])):
                raise ConfigError(f"{self.run.folder}: {place.name} {state}", found=f"{tensor.dtype} of shape "
                                  f"{list(tensor.shape)}", expected=f"fp32 of {list(self.run.shapes[place.name])}")
        if rule.is_stacked and len(tensors) == 1:
            return tensors[0].contiguous().view(rule.shape)  # transformers stacks the experts in the same order
        return to_ours(rule, tensors, self.config).contiguous()


def _part(tensor: torch.Tensor, place: _Place) -> torch.Tensor:
    return tensor if place.half is None else tensor.chunk(2, 1)[place.half]


def _places(rule: TensorRule, run: ForeignRun, config: ModelConfig) -> tuple[_Place, ...]:
    """Return where the source has our parameter. Raises ConfigError if it is not there, or has another shape."""
    if rule.is_stacked and rule.theirs[0] not in run.shapes:
        stacked, is_second = stacked_in_module(rule.theirs[0])
        is_half = stacked.endswith("gate_up_proj")
        experts, rows, columns = rule.shape
        _check_shape(run, stacked, (experts, 2 * rows if is_half else rows, columns))
        return (_Place(stacked, int(is_second) if is_half else None),)
    places = []
    for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True):
        in_module = name if rule.is_stacked or name in run.shapes else name_in_module(name, config)
        _check_shape(run, in_module, shape)
        places.append(_Place(in_module))
    return tuple(places)


def _check_shape(run: ForeignRun, name: str, expected: tuple[int, ...]) -> None:
    found: Any = run.shapes.get(name)
    if found is None:
        raise ConfigError(f"{run.folder}: {shorten(name)}", problem="the model of the config.json has this parameter, "
                          "and the checkpoint does not", remedy="name the config.json of this run by --model")
    if tuple(found) != tuple(expected):
        raise ConfigError(f"{run.folder}: {shorten(name)}", found=f"the shape {list(found)}",
                          expected=f"{list(expected)}, as the config.json says",
                          remedy="name the config.json of this run by --model")


def shapes_in_module(rules_of: Iterable[tuple[TensorRule, ...]], config: ModelConfig) -> dict[str, Shape]:
    """Return name -> shape of all tensors of the transformers module. `rules_of`: see rules_by_module_tensors."""
    return {name: shape for rules in rules_of for name, shape in module_shapes(rules, config).items()}


def read_in_module(name: str, rules_of: Iterable[tuple[TensorRule, ...]], config: ModelConfig,
                   read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the transformers module. `read` returns a parameter of ours by name."""
    rules = next(rules for rules in rules_of if name in module_shapes(rules, config))
    return module_tensors(rules, [read(rule.ours) for rule in rules], config)[name].contiguous()


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


def module_shapes(rules: Sequence[TensorRule], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `module_tensors` returns for the same rules."""
    if rules[0].is_stacked:
        experts, _, columns = rules[0].shape
        return {stacked_in_module(rules[0].theirs[0])[0]: (experts, sum(rule.shape[1] for rule in rules), columns)}
    names = [name_in_module(name, config) for name in rules[0].theirs]
    return dict(zip(names, rules[0].their_shapes(), strict=True))
