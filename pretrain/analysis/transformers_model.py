"""The transformers model of a run, checkpoint or transformers folder: weights are converted one tensor at a time."""

import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pretrain.analysis.model_source import LOCAL_FILES, ModelSource
from pretrain.errors import ConfigError, shorten
from pretrain.model.hf_names import TensorRule, name_in_module, stacked_in_module, tensor_rules
from pretrain.model.hf_weights import to_theirs
from pretrain.model.own_models import own_model, transformers_config
from pretrain.model.parameters import DTYPES
from pretrain.model.skeleton import parameters_on_meta
from pretrain.progress import ProgressBar

DeviceMap = dict[str, Any]  # name of a module of the transformers model -> device


def empty_model(source: ModelSource, dtype: str) -> Any:
    """Return the transformers model with parameters on the meta device and buffers on the CPU. Raises ConfigError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = None if source.config is None else own_model(source.config.architecture)
    try:
        config = AutoConfig.from_pretrained(source.folder, **LOCAL_FILES) if source.config is None else \
            transformers_config(source.config.hf_config)
        with parameters_on_meta():
            build = AutoModelForCausalLM.from_config if own is None else own.model_class._from_config
            model = build(config, dtype=DTYPES[dtype])
    except Exception as error:  # transformers raises any class for values that it does not expect
        raise _cannot_load(source.folder, error) from None
    return model.eval()


def _cannot_load(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(str(folder), problem=f"transformers cannot load this model: {shorten(str(error))}")


def load_model(source: ModelSource, dtype: str, placement: torch.device | DeviceMap, *,
               model: Any = None, offload_folder: Path | None = None) -> Any:
    """Return the transformers model with the source's weights. Raises ConfigError.

    Host memory holds at most one converted tensor, in addition to the parts of the model that are on the CPU.

    Args:
        placement: one device, or a device map of transformers.
        model: the result of `empty_model`, if there is one already.
        offload_folder: folder for the weights of modules that the device map places on "disk".
    """
    if source.config is None or source.hf_folder is not None:
        model = _load_transformers_folder(source.folder, dtype, placement, offload_folder)
    else:
        model = empty_model(source, dtype) if model is None else model
        _fill(model, source, placement)
        if isinstance(placement, dict):
            from accelerate import dispatch_model  # each module then moves its inputs to its device

            dispatch_model(model, placement, offload_dir=offload_folder, skip_keys=model._skip_keys_device_placement)
        else:
            model.to(placement)  # the buffers
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # only our flags choose how to generate
    return model.eval()


def _load_transformers_folder(folder: Path, dtype: str, placement: torch.device | DeviceMap,
                              offload_folder: Path | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    mapped = isinstance(placement, dict)
    settings: dict[str, Any] = {"device_map": placement, "offload_folder": offload_folder} if mapped else {}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype],
                                                             output_loading_info=True, **LOCAL_FILES, **settings)
    except Exception as error:  # transformers, safetensors and torch raise many classes for damaged files
        raise _cannot_load(folder, error) from None
    wrong = sorted(loaded["missing_keys"]) + sorted(str(key) for key in loaded["mismatched_keys"])
    if wrong:
        raise ConfigError(str(folder), problem=f"{len(wrong)} tensors of the model are missing or have another shape "
                          f"({wrong[0]} ...)", remedy="use a complete folder, as `ds-pretrain export` writes it")
    return model if mapped else model.to(placement)


def _fill(model: Any, source: ModelSource, placement: torch.device | DeviceMap) -> None:
    """Replace each parameter on the meta device by the checkpoint's, one tensor at a time."""
    from pretrain.checkpoint.format.shard_index import FP32  # needs DeepSpeed, transformers folders do not
    from pretrain.checkpoint.load.reader import CheckpointReader

    assert source.config is not None
    reader = CheckpointReader(source.folder)
    rules = tensor_rules(source.config)
    reader.check_shapes({rule.ours: rule.shape for rule in rules})
    # One buffer for all tensors: freed tensors of many sizes would leave holes between those that remain.
    buffer = torch.empty(max(prod(rule.shape) for rule in rules))
    with ProgressBar("loading", 4 * sum(prod(rule.shape) for rule in rules)) as progress:
        for rule in rules:
            ours = buffer[:prod(rule.shape)]
            reader.copy(rule.ours, FP32, 0, ours)
            if rule.is_stacked:
                _fill_stacked(model, rule, ours.view(rule.shape), placement)
            else:
                theirs = to_theirs(rule, ours.view(rule.shape), source.config)
                for name, tensor in zip(rule.theirs, theirs, strict=True):
                    _empty_parameter(model, name_in_module(name, source.config), tensor.shape, placement).copy_(tensor)
            progress.advance(4 * ours.numel(), rule.ours)
    saved = reader.buffers()
    for name, buffer_name, _ in source.config.named_buffers():
        model.get_buffer(buffer_name).copy_(saved[name])
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not empty, f"no tensor of the family's rules fills {empty}"


def _fill_stacked(model: Any, rule: TensorRule, ours: torch.Tensor, placement: torch.device | DeviceMap) -> None:
    """Fill the part of a parameter of all experts: transformers has `gate` and `up` in one parameter."""
    name, is_second = stacked_in_module(rule.theirs[0])
    shape = model.get_parameter(name).shape
    parameter = model.get_parameter(name) if is_second else _empty_parameter(model, name, shape, placement)
    parameter.narrow(1, ours.shape[1] if is_second else 0, ours.shape[1]).copy_(ours)


def _empty_parameter(model: Any, name: str, shape: torch.Size, placement: torch.device | DeviceMap) -> torch.Tensor:
    """Replace a parameter on the meta device by an uninitialized one, and return it."""
    parent, _, leaf = name.rpartition(".")
    empty = torch.empty(shape, dtype=model.dtype, device=_device_of(name, placement))
    model.get_submodule(parent)._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
    return empty


def _device_of(name: str, placement: torch.device | DeviceMap) -> torch.device:
    """Return the device that a parameter is loaded onto: for modules on "disk", the CPU."""
    if not isinstance(placement, dict):
        return placement
    module = max((key for key in placement if not key or name.startswith(f"{key}.")), key=len)
    return torch.device("cpu" if placement[module] == "disk" else placement[module])
