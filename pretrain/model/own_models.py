"""Model classes of the user's own code: --model MODULE:CONFIG_CLASS and --model_code MODULE:CONFIG_CLASS.

The module has a subclass of transformers' PreTrainedConfig with a `model_type`, and a PreTrainedModel with a head for
it. Afterwards every config.json with this model_type belongs to these classes, for as long as the process lives. The
flag must be given to each program that needs the model: run.json and manifests never make a program import code.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from pretrain.errors import ConfigError, did_you_mean
from pretrain.model.families import FAMILIES
from pretrain.own_code import import_own_module, own_code_failed

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
MODEL_CODE_HELP = "your own code for the run's model, as --model_code or --model named it in the run: no record of a " \
    "run makes this program import code"
_FORM = "MODULE:CONFIG_CLASS such as my_models.tiny:TinyConfig"


@dataclass(frozen=True)
class OwnModel:
    """Classes of the user's code."""

    code: str  # MODULE:CONFIG_CLASS
    config_class: Any
    model_class: Any


_own_models: dict[str, OwnModel] = {}  # by model_type


def own_model(model_type: object) -> OwnModel | None:
    """Return the user's classes for a model_type; None if there are none."""
    return _own_models.get(model_type) if isinstance(model_type, str) else None


def own_model_types() -> frozenset[str]:
    """Return the model types of the user's classes."""
    return frozenset(_own_models)


def is_model_code(model: str) -> bool:
    """Return whether a value of --model names a class in the user's own code."""
    return _CODE.fullmatch(model) is not None


def import_own_model(model: str, model_code: str | None) -> None:
    """Import the user's classes that the flags --model and --model_code name, if any. Raises ConfigError."""
    if model_code is not None and not is_model_code(model_code):
        raise ConfigError("--model_code", found=repr(model_code), expected=_FORM)
    if is_model_code(model):
        if model_code not in (None, model):
            raise ConfigError("--model / --model_code", found="two classes", expected="one of the two",
                              remedy="--model_code gives the classes of a --model FOLDER")
        _import(model, f"--model {model}")
    elif model_code is not None:
        _import(model_code, f"--model_code {model_code}")


def imported_model_code(text: str) -> str:
    """Import the classes that a command's flag --model_code names, as argparse parses it. Raises ConfigError."""
    import_own_model("", text)
    return text


def default_values(code: str) -> dict[str, Any]:
    """Return the content of a config.json with the defaults of an imported config class. Raises ConfigError."""
    found = next(own for own in _own_models.values() if own.code == code)
    try:
        values: dict[str, Any] = json.loads(found.config_class().to_json_string(use_diff=False))
    except Exception as error:
        raise own_code_failed(f"--model {code}", f"{code.partition(':')[2]}()", error) from error
    return values


def _import(code: str, where: str) -> None:
    if any(own.code == code for own in _own_models.values()):
        return
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    module_name, _, name = code.partition(":")
    module = import_own_module(module_name, where)
    config_class: Any = getattr(module, name, None)
    if not isinstance(config_class, type) or not issubclass(config_class, PreTrainedConfig):
        known = [key for key, value in vars(module).items()
                 if isinstance(value, type) and issubclass(value, PreTrainedConfig) and value is not PreTrainedConfig]
        raise ConfigError(where, problem=f"{module.__file__} has no subclass {name} of transformers' PreTrainedConfig",
                          remedy=did_you_mean(name, known) or "name the class of the model's config")
    model_type = getattr(config_class, "model_type", "")
    if not model_type or model_type in CONFIG_MAPPING_NAMES or model_type in FAMILIES:
        raise ConfigError(where, found=f"model_type {json.dumps(model_type)} in {name}",
                          expected="a name that no model of transformers has",
                          remedy=f'write a line such as model_type = "my_{module_name.rpartition(".")[2]}" into {name}')
    _own_models[model_type] = OwnModel(code, config_class, _model_class(module, config_class, where))


def _model_class(module: Any, config_class: Any, where: str) -> Any:
    """Return the class that is registered with AutoModelForCausalLM, or the module's only model with a head."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    models: list[Any] = [value for value in vars(module).values() if isinstance(value, type)
                         and issubclass(value, PreTrainedModel)
                         and getattr(value, "config_class", None) is config_class]
    with_head = [model for model in models if _has_head(model, config_class, where, is_only=len(models) == 1)]
    if len(with_head) == 1:
        return with_head[0]
    found = [model.__name__ for model in with_head or models]
    raise ConfigError(where, found=f"{', '.join(found) or 'no PreTrainedModel'} with config_class = "
                      f"{config_class.__name__} in {module.__file__}",
                      expected="one PreTrainedModel with a head, whose get_output_embeddings() returns it",
                      remedy=f"AutoModelForCausalLM.register({config_class.__name__}, MODEL_CLASS) in the module "
                      "chooses one")


def _has_head(model_class: Any, config_class: Any, where: str, *, is_only: bool) -> bool:
    from pretrain.model.skeleton import create_skeleton

    try:
        return create_skeleton(config_class(), model_class).get_output_embeddings() is not None
    except Exception as error:  # a base class without modules fails too
        if is_only:
            raise own_code_failed(where, f"{model_class.__name__}({config_class.__name__}())", error) from error
        return False


def config_class_of(model_type: str) -> Any:
    """Return the config class of a model_type: the user's own, or that of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = own_model(model_type)
    return CONFIG_MAPPING[model_type] if own is None else own.config_class


def transformers_config(values: dict[str, Any]) -> Any:
    """Return the config object of a config.json's content."""
    decoded = json.loads(json.dumps(values), object_hook=_special_float)
    return config_class_of(values["model_type"]).from_dict(decoded)


def _special_float(values: dict[str, Any]) -> Any:
    """Return the float of transformers' form {"__float__": "Infinity"}, and other dicts unchanged."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values
