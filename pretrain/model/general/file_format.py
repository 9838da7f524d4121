"""The tensors of a described model in weights files: names and forms by the conversions of transformers itself.

Files of a model with experts often have one tensor for each expert, where its module has one tensor for all. The rules
are those that `from_pretrained` and `save_pretrained` apply (transformers/conversion_mapping.py).
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.model.description import Layer, ModelConfig
from pretrain.model.general.decoder import decoder_of

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Conversion:
    """Tensors of weights files that transformers converts together, and the tensors of its model that they become."""

    sources: tuple[str, ...]  # names in the files
    targets: Shapes  # by name in the model
    is_renaming: bool  # the only source is the only target
    _patterns: tuple[str, ...]  # of transformers, one for each source
    _transform: Any
    _model: Any

    def convert(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the model for the tensors `sources`."""
        return _convert(self._transform, self._model, next(iter(self.targets)), self.sources, self._patterns, tensors)


def conversions_from_files(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Conversion]:
    """Yield the conversions of all tensors of some files, as `from_pretrained` finds them, by names and shapes alone.

    Tensors that the model ignores are left out, such as layers that predict further tokens. A tensor that the model
    does not have becomes a target under its own name.

    Raises ValueError with the name of a tensor that cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    model = decoder_of(config).model
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
            yield Conversion((sources[0],), {target: shapes[sources[0]]}, True, (), None, None)
            continue
        tensors = [torch.empty(shapes[name], device="meta") for name in sources]
        try:
            result = _convert(transform, model, target, sources, patterns, tensors)
        except Exception:  # operations of transformers fail in their own ways for tensors that are missing or differ
            raise ValueError(sources[0]) from None
        yield Conversion(tuple(sources), {name: tuple(tensor.shape) for name, tensor in result.items()}, False,
                         tuple(patterns), transform, model)


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


@dataclass(frozen=True)
class FileTensors:
    """Tensors of a model that are converted together, and the tensors of weights files that they become."""

    sources: tuple[str, ...]  # names in the model
    targets: dict[str, torch.Tensor]  # on the meta device, by name in the files
    is_same: bool  # there is one tensor, which is not converted


def file_tensors(config: ModelConfig, dtype: torch.dtype) -> Iterator[FileTensors]:
    """Yield all tensors that `save_pretrained` writes of a described model. Parameters have this dtype, buffers fp32.

    As few tensors as possible are converted together: one, or those of a layer.
    """
    for layer in config.layers():
        if layer.kind == "head" and layer.tied:
            continue
        tensors = _meta_tensors(layer, dtype)
        together = to_files(config, tensors)
        if _shapes(together) == _shapes(tensors):
            yield from (FileTensors((name,), {name: tensor}, True) for name, tensor in tensors.items())
        elif (alone := _each_alone(config, tensors, together)) is not None:
            yield from alone
        else:
            yield FileTensors(tuple(tensors), together, False)


def to_files(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` writes for these tensors of the model, by name."""
    from transformers.core_model_loading import revert_weight_conversion

    result: dict[str, torch.Tensor] = revert_weight_conversion(decoder_of(config).model, tensors)
    return result


def _each_alone(config: ModelConfig, tensors: dict[str, torch.Tensor],
                together: dict[str, torch.Tensor]) -> list[FileTensors] | None:
    """Return the conversion of each tensor by itself; None if tensors of the layer depend on each other."""
    result: list[FileTensors] = []
    for name, tensor in tensors.items():
        try:
            targets = to_files(config, {name: tensor})
        except Exception:  # an operation that needs the other tensors, too
            return None
        result.append(FileTensors((name,), targets, _shapes(targets) == {name: tuple(tensor.shape)}))
    found = {name: tensor for each in result for name, tensor in each.targets.items()}
    is_equal = _shapes(found) == _shapes(together) and sum(len(each.targets) for each in result) == len(found)
    return result if is_equal else None


def _meta_tensors(layer: Layer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    pairs = [*zip(layer.their_names, layer.parameters, strict=True)]
    result = {name: torch.empty(parameter.shape, dtype=dtype, device="meta") for name, parameter in pairs}
    buffers = zip(layer.their_buffers, layer.buffers, strict=True)
    return result | {name: torch.empty(buffer.shape, device="meta") for name, buffer in buffers}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
