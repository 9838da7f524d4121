"""The implementation of a model of transformers: its own modules, layer by layer, and its tensors in weights files.

Files of a model with experts often have one tensor for each expert, where its module has one tensor for all. The rules
are those that `from_pretrained` and `save_pretrained` apply (transformers/conversion_mapping.py).
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pretrain.active_extensions import model_flags
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout_rules import EXPERT, SEQUENCE, TENSOR, ZERO, Rule
from pretrain.config.model_of_run import DROPOUTS
from pretrain.errors import counted
from pretrain.extensions.wrapped.decoder import Decoder
from pretrain.model.config_keys import IGNORED
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.hf_names import TensorRule, tensor_rules
from pretrain.model.implementation import FromFiles, LayerBytes, Shape, ToFiles
from pretrain.model.init_methods import Initialization
from pretrain.model.operator_memory import MicroBatch
from pretrain.model.parameters import DTYPES

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec

    from pretrain.config.plan import Plan
    from pretrain.distributed.parallel_groups import ParallelGroups
    from pretrain.model.layers.vocabulary import TrainingLoss
    from pretrain.model.recompute import Recompute

Tensors = dict[str, torch.Tensor]  # by name
_INITIAL_VALUES = ("init_method", "output_init_method", "init_std", "mup_base_width")
_OF_EXPERTS = ("router_aux_loss", "router_z_loss", "expert_capacity_factor")


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


@dataclass(frozen=True)
class WrappedDecoder:
    """Implements model/implementation.py for a decoder. Equal configs have the same one."""

    decoder: Decoder
    trains_padding_row = False

    def layers(self, config: ModelConfig) -> tuple[Layer, ...]:
        return self.decoder.layers

    def settings(self, config: ModelConfig) -> Mapping[str, Any]:
        return {key: value for key, value in config.hf_config.items() if key not in IGNORED}

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        return [TensorRule(ours, parameter.shape, (theirs,))
                for (ours, parameter), theirs in zip(config.named_parameters(), config.their_names(), strict=True)]

    def head_name(self, config: ModelConfig) -> str:
        return self.decoder.layers[-1].their_names[0]

    def name_in_module(self, config: ModelConfig, name: str) -> str:
        return name

    def from_files(self, config: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[FromFiles]:
        return conversions_from_files(self.decoder.model, shapes)

    def to_files(self, config: ModelConfig, dtype: str) -> Iterator[ToFiles]:
        return file_tensors(config, self.decoder.model, dtype)

    def rules(self, plan: "Plan") -> Iterator[Rule]:
        """Parallelism inside of layers, and flags that change what a layer computes or how it starts."""
        args, layout, model = plan.args, plan.layout, plan.model
        its = f"the layers of {model.architecture} are transformers' own modules"
        for key, size in ((TENSOR, layout.tensor_parallel_size), (SEQUENCE, layout.sequence_parallel_size),
                          (EXPERT, layout.expert_parallel_size)):
            yield Rule(size > 1, key, problem=f"{its}, which cannot be divided among ranks",
                       remedy='use ZeRO, or "pipeline": {"stages": N}; remove the key')
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            yield Rule(plan.get(f"{ZERO}.{name}"), f"{ZERO}.{name}", problem=f"{its}, of which DeepSpeed's "
                       "quantization does not support all shapes", remedy="remove the key")
        yield Rule(args.document_attention, "--document_attention", problem=f"{its}, which see all tokens of a sample",
                   remedy="leave the flag out; --eod_mask_loss and --packing best_fit have an effect")
        yield Rule(args.compile_blocks, "--compile_blocks", problem=f"{its}, which may not be one graph",
                   remedy="leave the flag out")
        yield Rule(args.recompute in ("attention", "mlp"), "--recompute", "blocks or none",
                   f"{its}, which are recomputed as a whole")
        yield Rule(args.mlp_tiles > 1, "--mlp_tiles", "1", its)
        for name in _INITIAL_VALUES:
            yield Rule(getattr(args, name) != getattr(RunArguments, name), f"--{name}", problem="it has no effect: the "
                       f"_init_weights of {model.architecture} in transformers draws the initial weights",
                       remedy="leave the flag out; --model_overrides initializer_range=0.01 or the like has an effect")
        for name in DROPOUTS:
            yield Rule(getattr(args, name) is not None, f"--{name}", problem=f"it has no effect: {its}",
                       remedy="--model_overrides changes the dropouts of the config.json, under its own keys")
        for name in _OF_EXPERTS:
            yield Rule(getattr(args, name) != getattr(type(args), name), f"--{name}", problem="it has no effect: "
                       f"{its}, whose loss is the cross-entropy", remedy="leave the flag out")
        for name in model_flags(args):
            yield Rule(True, f"--{name}", problem=its, remedy="leave the flag out")

    def notes(self, plan: "Plan") -> list[str]:
        from pretrain.extensions.wrapped.read import unread_keys

        model = plan.model
        notes = [f"{model.architecture} is trained with the model's own modules: without tensor and sequence "
                 "parallelism and this program's kernels" +
                 (", so that --plain_operators has no effect" if plan.args.plain_operators else "")]
        if unread := unread_keys(model.hf_config):
            notes.append(f"{model.architecture} of transformers has no such key, and ignores it: {', '.join(unread)}")
        return notes

    def has_dropout(self, config: ModelConfig) -> bool:
        found = [value for key, value in config.hf_config.items() if "drop" in key or "noise" in key]
        return any(isinstance(value, (int, float)) and value > 0 for value in found)

    def output_std(self, config: ModelConfig, how: Initialization) -> None:
        return None

    def prove(self, config: ModelConfig, precision: str, announce: Callable[[str], None] | None = None) -> str:
        if announce is not None:
            announce("comparing a tiny copy of the model with transformers")
        from pretrain.extensions.wrapped.prove import prove_wrapped

        proof = prove_wrapped(config, precision)
        return f"on a tiny copy of {counted(proof.num_layers, 'layer')}, the loss and {proof.num_gradients} " \
               "gradients are those of transformers"

    def layer_bytes(self, config: ModelConfig, layer: Layer, batch: MicroBatch, part: str) -> LayerBytes:
        from pretrain.extensions.wrapped.layer_memory import measured_bytes

        return measured_bytes(config, self.decoder, batch).layers[layer]

    def shared_bytes(self, config: ModelConfig, batch: MicroBatch) -> int:
        from pretrain.extensions.wrapped.layer_memory import measured_bytes

        return measured_bytes(config, self.decoder, batch).arguments

    def specs(self, config: ModelConfig, *, ends_in_loss: bool, plain_operators: bool, loss: "TrainingLoss | None",
              recompute: "Recompute", groups: "ParallelGroups") -> "list[LayerSpec]":
        from pretrain.extensions.wrapped.modules import wrapped_specs

        return wrapped_specs(config, self.decoder, ends_in_loss=ends_in_loss, loss=loss, recompute=recompute)

    def initialize(self, module: nn.Module, config: ModelConfig, *, seed: int, how: Initialization) -> None:
        """Fill the parameters layer by layer, because a model of transformers draws the values of a layer together."""
        import deepspeed

        own = dict(module.named_parameters())
        for index, layer in enumerate(self.decoder.layers):
            prefix = "tied_modules.embed" if layer.tied else str(index)
            parameters = {each.name: own[f"{prefix}.{each.name}"] for each in layer.parameters
                          if f"{prefix}.{each.name}" in own}
            if not parameters or (layer.tied and layer.kind == "head"):
                continue
            partitioned = [each for each in parameters.values() if hasattr(each, "ds_id")]
            first = not partitioned or \
                deepspeed.comm.get_rank(partitioned[0].ds_process_group) == 0  # type: ignore[attr-defined]
            values = self.decoder.initial_values(layer, index, seed) if first else {}
            for name, parameter in parameters.items():
                with deepspeed.zero.GatheredParameters([parameter] if partitioned else [], modifier_rank=0), \
                        torch.no_grad():
                    if first:
                        parameter.copy_(values[name])

    def initial_buffers(self, config: ModelConfig) -> Mapping[str, torch.Tensor]:
        return {theirs: self.decoder.model.get_buffer(theirs) for _, theirs, _ in config.named_buffers()}

    def attention_name(self, config: ModelConfig) -> str:
        return f"{self.decoder.model.config._attn_implementation} of transformers"
