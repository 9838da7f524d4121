"""The tensors of a wrapped model in weights files: names and forms by the conversions of transformers itself.

Files of a model with experts often have one tensor for each expert, where its module has one tensor for all. The rules
are those that `from_pretrained` and `save_pretrained` apply (transformers/conversion_mapping.py).
"""

import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pretrain.model.description import Layer, ModelConfig
from pretrain.model.hf_names import tensor_rules
from pretrain.model.implementation import FromFiles, Shape, ToFiles
from pretrain.model.parameters import DTYPES

Tensors = dict[str, torch.Tensor]  # by name


def conversions_from_files(model: Any, shapes: Mapping[str, Shape]) -> Iterator[FromFiles]:
    """Yield the conversions of all tensors of some files, as `from_pretrained` finds them, by names and shapes alone.

    Tensors that the model ignores are left out, such as layers that predict further tokens. A tensor that the model
    does not have becomes a target under its own name.

    Raises ValueError with the name of a tensor that cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, tuple[Any, list[str], list[str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state and _is_ignored(model, target):
            continue
        transform = WeightRenaming(name, target) if pattern is None else by_pattern[pattern]
        _, sources, patterns = found.setdefault(target, (transform, [], []))
        sources.append(name)
        patterns.append(pattern or name)
    for target, (transform, sources, patterns) in found.items():
        if isinstance(transform, WeightRenaming):
            if len(sources) > 1:
                raise ValueError(sources[1])
            yield FromFiles((sources[0],), {target: shapes[sources[0]]})
            continue
        tensors = [torch.empty(shapes[name], device="meta") for name in sources]
        try:
            result = _convert(transform, model, target, sources, patterns, tensors)
        except Exception:  # operations of transformers fail in their own ways for tensors that are missing or differ
            raise ValueError(sources[0]) from None
        yield FromFiles(tuple(sources), _shapes(result), partial(_convert, transform, model, target, sources, patterns))


def _convert(transform: Any, model: Any, first: str, sources: Sequence[str], patterns: Sequence[str],
             tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    transform = copy.deepcopy(transform)  # it collects the tensors of one parameter
    for name, pattern, tensor in zip(sources, patterns, tensors, strict=True):
        transform.add_tensor(first, name, pattern, tensor)
    result = transform.convert(first, model=model, config=model.config)
    return {name: (tensor[0] if isinstance(tensor, list) else tensor).contiguous() for name, tensor in result.items()}


def _is_ignored(model: Any, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def file_tensors(config: ModelConfig, model: Any, dtype: str) -> Iterator[ToFiles]:
    """Yield all tensors that `save_pretrained` writes of a wrapped model. Parameters have this dtype, buffers fp32.

    As few tensors as possible are converted together: one, or those of a layer.
    """
    rules = {rule.theirs[0]: rule for rule in tensor_rules(config)}

    def together(sources: Iterable[str], targets: Tensors) -> ToFiles:
        return ToFiles(_planned(targets), None, tuple(sources), lambda tensors: to_files(model, tensors).values())

    def alone(name: str, tensor: torch.Tensor) -> ToFiles:
        """Return one tensor that is not converted: a parameter, or a buffer."""
        if name in rules:
            return ToFiles(_planned({name: tensor}), rules[name])
        return together((name,), {name: tensor})

    for layer in config.layers():
        if layer.kind == "head" and layer.tied:
            continue
        tensors = _meta_tensors(layer, DTYPES[dtype])
        targets = to_files(model, tensors)
        if _shapes(targets) == _shapes(tensors):
            yield from itertools.starmap(alone, tensors.items())
        elif (found := _each_alone(model, tensors, targets)) is not None:
            for name, converted in found.items():
                is_same = _shapes(converted) == {name: tuple(tensors[name].shape)}
                yield alone(name, converted[name]) if is_same else together((name,), converted)
        else:
            yield together(tensors, targets)


def to_files(model: Any, tensors: Tensors) -> Tensors:
    """Return what `save_pretrained` writes for these tensors of the model, by name."""
    from transformers.core_model_loading import revert_weight_conversion

    result: Tensors = revert_weight_conversion(model, tensors)
    return result


def _each_alone(model: Any, tensors: Tensors, together: Tensors) -> dict[str, Tensors] | None:
    """Return the conversion of each tensor by itself; None if tensors of the layer depend on each other."""
    result: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        try:
            result[name] = to_files(model, {name: tensor})
        except Exception:  # an operation that needs the other tensors, too
            return None
    found = {name: tensor for targets in result.values() for name, tensor in targets.items()}
    is_equal = _shapes(found) == _shapes(together) and sum(map(len, result.values())) == len(found)
    return result if is_equal else None


def _meta_tensors(layer: Layer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    pairs = [*zip(layer.their_names, layer.parameters, strict=True)]
    result = {name: torch.empty(parameter.shape, dtype=dtype, device="meta") for name, parameter in pairs}
    buffers = zip(layer.their_buffers, layer.buffers, strict=True)
    return result | {name: torch.empty(buffer.shape, device="meta") for name, buffer in buffers}


def _planned(tensors: Tensors) -> dict[str, tuple[str, Shape]]:
    """Return dtypes and shapes of tensors on the meta device."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {name: (names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
