"""Read values and tensors of a run of another program under this project's names.

Weights and optimizer states follow the same rules. `read_in_module` is the other direction, for sources whose tensors
are similar to ours and not to those of transformers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import ForeignRun, Shape
from pretrain.model.config import ModelConfig
from pretrain.model.hf_names import TensorRule, name_in_module, stacked_in_module, tensor_rules
from pretrain.model.hf_weights import module_shapes, module_tensors, to_ours

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # keys of Manifest.loss_scale


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
    half: int | None = None  # of a matrix that stacks two: the first (0) or the second half of dimension 1


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
