"""Read a transformers config.json of any supported architecture into a ModelConfig.

families/ has the keys of each family. This file imports neither torch nor transformers, so that a run is validated in
well under a second.
"""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

from pretrain.active_extensions import advice_on, extensions
from pretrain.errors import ConfigError, shorten
from pretrain.hub import find_repository, is_repository, snapshot_in
from pretrain.model.config_keys import (
    NotTrainedHereError,
    check_model_keys,
    check_model_types,
    check_values,
    parse_overrides,
    read_config_json,
)
from pretrain.model.description import ModelConfig
from pretrain.model.families import FAMILIES
from pretrain.model.families.family import listing
from pretrain.model.family_model import FamilyModel
from pretrain.model.own_models import default_values, is_model_code

PRESETS = Path(__file__).parent / "presets"
# Upper limits, far beyond any model. They prevent lists or tables of absurd size.
_LARGEST = {"vocab_size": 2**24, "hidden_size": 2**20, "num_layers": 10**5, "num_heads": 2**20, "num_kv_heads": 2**20,
            "head_size": 2**20, "intermediate_size": 2**24, "max_positions": 2**31 - 1, "norm_eps": 1.0}
_LARGEST_TABLE = 2**24  # learned positions


def preset_names() -> list[str]:
    """Return the names of the presets that `--model` accepts."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def find_config(model: str) -> Path:
    """Return the path of the config.json that a preset's name, a file, a folder or a repository selects.

    A repository (org/name) is downloaded if the local cache does not have it. Raises ConfigError.
    """
    preset = PRESETS / f"{model}.json"
    if model in preset_names():
        return preset
    if is_repository(model):
        return find_repository(model, flag="--model", want="config") / "config.json"
    folder = os.path.isdir(model)
    path = snapshot_in(Path(model)) / "config.json" if folder else Path(model)
    if os.path.isfile(path):
        return path
    if os.path.isdir(os.path.join(model, "checkpoints")):
        raise ConfigError(f"--model {shorten(model)}", problem="this is a run folder, and not a config.json",
                          remedy=f"--init_from {shorten(model)} takes the model and the weights of that run")
    if folder or "/" in model or model.endswith(".json"):
        raise ConfigError(f"--model {shorten(model)}", problem=f"there is no file {shorten(str(path))}",
                          remedy="give a preset's name, a transformers config.json, or the folder that holds one" +
                          ("; a class of your own code is MODULE:CONFIG_CLASS" if ":" in model else ""))
    names = preset_names()
    problem = f"there is no preset, file or folder {shorten(model)!r}"
    if re.fullmatch(r"\d+(\.\d+)?[kmbt]", model, re.IGNORECASE) and (advice := advice_on("model of a size")):
        raise ConfigError("--model", problem=problem, remedy=advice[0].replace("{model}", model))
    if similar := [name for name in names if _beginning(name) == _beginning(model)]:
        raise ConfigError("--model", problem=problem, word=model, known=names,
                          remedy=f"the presets with a similar name are {', '.join(similar)}")
    raise ConfigError("--model", problem=problem, word=model, known=names,
                      remedy="give a config.json, its folder, a repository (org/name), a class of your own "
                      f"(module:Class) or one of {', '.join(names)}")


def _beginning(name: str) -> str:
    """Return the letters and digits with which a model's name begins: gpt2 of gpt2-xl, llama of llama3-8b."""
    family = re.split(r"[-_ ]", name.lower())[0]
    return family if family.startswith("gpt") else family.rstrip("0123456789.")


def load_model_config(model: str, overrides: str | None = None) -> ModelConfig:
    """Load the model config that `--model` and `--model_overrides` specify.

    Args:
        model: preset name, path of a config.json, or of a folder that holds one.
        overrides: `key=value,key=value` with keys of that config.json.

    Raises:
        ConfigError: the preset or file does not exist, an override is invalid, or an architecture, key or value is not
            implemented.
    """
    if not model:
        raise ConfigError("--model", problem="it is required", remedy="give a config.json, its folder, or one of "
                          f"{', '.join(preset_names())}")
    if is_model_code(model):
        return model_config_from(default_values(model), f"--model {model}", overrides)
    path = find_config(model)
    where = f"--model {model}" if path.parent == PRESETS else str(path)
    return model_config_from(read_config_json(path), where, overrides)


def model_config_from(values: dict[str, Any], where: str, overrides: str | None = None) -> ModelConfig:
    """Return the model config for a config.json's content. `where` names the file in errors.

    Raises ConfigError: NotTrainedHereError if the values may be those of a model of transformers.
    """
    check_values(values, where)
    try:
        return _read_model(values, where, overrides)
    except ConfigError as error:
        for key in (pair.partition("=")[0] for pair in (overrides or "").split(",")):
            # the file does not have the value that is wrong
            if key and str(error).startswith(f"{where}: {key}: "):
                raise ConfigError.from_line(f"--model_overrides {str(error).removeprefix(f'{where}: ')}") from None
        raise


def _read_model(values: dict[str, Any], where: str, overrides: str | None) -> ModelConfig:
    architecture = values.get("model_type")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        return _read_other(values, where, overrides)
    check_model_keys(values, architecture, where)
    changed = parse_overrides(overrides, architecture, values) if overrides else {}
    values = {**values, **changed}
    check_model_keys(values, architecture, "--model_overrides" if changed else where)
    check_model_types(values, architecture, where)
    family = FAMILIES[architecture]
    config = ModelConfig(architecture=architecture, hf_config=copy.deepcopy(values), key_names=family.key_names,
                         implementation=FamilyModel(), **family.read_fields(values, where))
    _check_sizes(config, where)
    return config


def _read_other(values: dict[str, Any], where: str, overrides: str | None) -> ModelConfig:
    """Return the config of a model without a family, if an extension has its implementation."""
    architecture, known, others = values.get("model_type"), list(FAMILIES), []
    for extension in extensions():
        if extension.models is None:
            continue
        others.append(extension.models.which)
        types = extension.load(extension.models.model_types)() if isinstance(architecture, str) else ()
        if architecture in types:
            config: ModelConfig = extension.load(extension.models.read)(values, where, overrides)
            return config
        known += sorted(types)
    remedy = "--model_code my_model:MyConfig names your own code for this model_type" + \
        (": the code of the auto_map is never run" if "auto_map" in values else "")
    raise NotTrainedHereError(
        f"{where}: model_type", found="nothing" if architecture is None else json.dumps(architecture),
        expected=", or ".join([f"one of {listing(FAMILIES)}", *others]),
        remedy=remedy if architecture and others else "", word=str(architecture).lower().replace("-", "_"), known=known)


def _check_sizes(config: ModelConfig, where: str) -> None:
    """Raise ConfigError for sizes that are out of range or do not divide each other as required."""
    for field, largest in _LARGEST.items():
        value = getattr(config, field)
        if field == "head_size" and value == 0 and config.key(field) not in config.hf_config:
            continue  # hidden_size is smaller than num_heads, and no multiple of it
        if not 0 < value <= largest:
            raise ConfigError(f"{where}: {config.key(field)}", found=value,
                              expected="more than 0" if value <= 0 else f"at most {largest:,}")
    if config.position == "learned" and config.max_positions > _LARGEST_TABLE:
        raise ConfigError(f"{where}: {config.key('max_positions')}", found=config.max_positions,
                          expected=f"at most {_LARGEST_TABLE:,}")
    for field in ("embedding_dropout", "attention_dropout", "residual_dropout"):
        if not 0 <= getattr(config, field) < 1:
            raise ConfigError(f"{where}: {config.key(field)}", found=getattr(config, field),
                              expected="a probability from 0 to below 1")
    if not 0 <= config.initializer_range <= 1e3:
        raise ConfigError(f"{where}: initializer_range", found=config.initializer_range,
                          expected="a standard deviation, such as 0.02")
    if config.num_experts:
        _check_experts(config, where)
    for multiple, divisor in (("hidden_size", "num_heads"), ("num_heads", "num_kv_heads")):
        if getattr(config, multiple) % getattr(config, divisor):
            raise ConfigError(f"{where}: {config.key(multiple)}", found=getattr(config, multiple),
                              expected=f"a multiple of {config.key(divisor)} ({getattr(config, divisor)})")
    if config.position == "rope" and not (0 < config.rotary_size <= config.head_size and config.rotary_size % 2 == 0):
        raise ConfigError(f"{where}: {config.key('rotary_size')}", found=f"{config.rotary_size} rotary elements a head",
                          expected=f"an even number from 2 to the head size ({config.head_size})")


def _check_experts(config: ModelConfig, where: str) -> None:
    """Raise ConfigError for sizes of experts that are out of range."""
    largest = {"num_experts": 2**14, "experts_per_token": config.num_experts,
               "moe_intermediate_size": _LARGEST["intermediate_size"]}
    for field, high in largest.items():
        value = getattr(config, field)
        if not 0 < value <= high:
            raise ConfigError(f"{where}: {config.key(field)}", found=value, expected="more than 0" if value <= 0 else
                              f"at most {high:,}" + (", the number of experts" if field == "experts_per_token" else ""))
    if not 0 <= config.shared_expert_size <= _LARGEST["intermediate_size"]:
        raise ConfigError(f"{where}: {config.key('shared_expert_size')}", found=config.shared_expert_size,
                          expected="the inner size of the shared expert")
    if not 0 <= config.router_aux_loss <= 1e3:
        raise ConfigError(f"{where}: {config.key('router_aux_loss')}", found=config.router_aux_loss,
                          expected="a coefficient, such as 0.01")
    if not config.num_moe_layers():
        raise ConfigError(f"{where}: mlp_only_layers", problem="no layer has experts",
                          remedy="remove layers from mlp_only_layers, or lower decoder_sparse_step")
