"""Read a config.json without a family of ours into a ModelConfig. Imports transformers and torch, in seconds."""

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, closest, shorten
from pretrain.extensions.wrapped.decoder import Decoder, decoder_from, first_size
from pretrain.extensions.wrapped.parts import UnknownPartsError
from pretrain.extensions.wrapped.wrapped_decoder import WrappedDecoder
from pretrain.model.config_keys import (
    IGNORED,
    TYPES,
    NotTrainedHereError,
    check_limits,
    check_values,
    parse_value,
    split_overrides,
)
from pretrain.model.description import ModelConfig
from pretrain.model.families import FAMILIES
from pretrain.model.own_models import config_class_of, own_model
from pretrain.own_code import own_code_failed

# attributes of transformers' configs with the values of fields of ModelConfig
_HEADS = ("num_attention_heads", "n_head")  # not num_heads: the heads of a state space model, without keys
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_NO_LIMIT = 2**31 - 1  # tokens
_OLDER_KEYS = frozenset(("rope_theta", "rope_scaling", "partial_rotary_factor", "auto_map"))  # transformers reads them
_OF_STORED_WEIGHTS = "quantization_config"  # how published weights are stored; those of a run are not quantized


def wrapped_config(values: dict[str, Any], where: str, overrides: str | None = None) -> ModelConfig:
    """Return the config with its layers. `where` names the file in errors. Raises ConfigError."""
    model_type = values["model_type"]
    values = {key: value for key, value in values.items() if key != _OF_STORED_WEIGHTS}
    keys = _known_keys(values, where)
    for key in unread_keys(values, keys):
        meant = closest(key, keys)
        if meant and values.get(meant) != values[key]:  # no second name of a key that is given
            raise ConfigError(f"{where}: {shorten(key)}", problem=f"this is not a key of a {model_type} config",
                              remedy="Remove it if it does not change the model", word=key, known=[meant])
    if overrides:
        values, where = {**values, **_changes(overrides, values, keys)}, "--model_overrides"
        check_values(values, where)
    check_limits(values, where)
    decoder = _checked_decoder(values, where)
    config = ModelConfig(
        architecture=model_type, hf_config=copy.deepcopy(values), key_names=_key_names(decoder),
        tie_word_embeddings=decoder.parts.tied, implementation=WrappedDecoder(decoder), **_sizes(decoder),
        padding_token=getattr(decoder.model.get_submodule(decoder.parts.embedding), "padding_idx", None),
        norm="", norm_eps=0.0, activation="", gated_mlp=False, position="", initializer_range=0.0)
    for key in ("output_router_logits", "layerdrop"):
        if getattr(decoder.model.config, key, None):
            raise NotTrainedHereError(
                f"{where}: {key}", found=json.dumps(getattr(decoder.model.config, key)),
                expected="false: the loss is the cross-entropy" if key == "output_router_logits" else
                "0: each step computes all layers",
                remedy=f"--model_overrides {key}={'false' if key == 'output_router_logits' else '0'}")
    return config


def _known_keys(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys that a config.json of this architecture may have, with their defaults."""
    model_type = values["model_type"]
    try:
        return {**config_class_of(model_type)().to_dict(), **config_class_of(model_type).attribute_map}
    except Exception as error:
        raise _rejected(model_type, where, error) from error


def unread_keys(values: dict[str, Any], known: dict[str, Any] | None = None) -> list[str]:
    """Return the keys of a config.json that neither this program nor the code of its model reads.

    Published files have such keys of other programs. `known`: of `_known_keys`.
    """
    known = _known_keys(values, "config.json") if known is None else known
    others = [key for key in values if key not in known and key not in IGNORED | _OLDER_KEYS and key[:1] != "_"]
    if not others:
        return []
    source = Path(inspect.getfile(config_class_of(values["model_type"])))
    code = "".join(path.read_text(encoding="utf-8") for path in {source, *source.parent.glob("modeling_*.py")})
    return [key for key in others if not re.search(rf"""["'.]{re.escape(key)}\b""", code)]


def _rejected(model_type: str, where: str, error: Exception) -> ConfigError:
    """Return the error for an exception of transformers, or of the user's code."""
    own = own_model(model_type)
    if own is not None:
        return own_code_failed(where, f"the model of {own.code}", error)
    text = " ".join(str(error).split())
    return ConfigError(f"{where}: {model_type}", problem="transformers cannot build this model: "
                       f"{type(error).__name__}: {shorten(text)}")


def _checked_decoder(values: dict[str, Any], where: str) -> Decoder:
    try:
        return decoder_from(values)
    except UnknownPartsError as error:
        raise NotTrainedHereError(
            f"{where}: model_type", problem=f"{values['model_type']} is not a stack of decoder layers that can be "
            f"trained layer by layer: {error}",
            remedy=f"the families without this limit are {', '.join(FAMILIES)}") from None
    except Exception as error:
        raise _rejected(values["model_type"], where, error) from error


def _changes(text: str, current: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Parse --model_overrides into values with the types of the file's values, or of the defaults."""
    changed: dict[str, Any] = {}
    for key, value in split_overrides(text):
        where = f"--model_overrides {key}"
        if key == "model_type" or (key not in keys and key not in current):
            raise ConfigError(shorten(where), problem=f"this is not a key of a {current['model_type']} config.json",
                              word=key, known=keys)
        if key in changed:
            raise ConfigError(where, problem="the key is given twice")
        before = current.get(key, keys.get(key))
        changed[key] = _parsed(value, before, where)
    return changed


def _parsed(text: str, before: Any, where: str) -> Any:
    """Parse a value: JSON of the type that the key has now. If it is null now, any number, true, false or text."""
    if text.lower() in ("none", "null"):
        return None
    if before is None:
        try:
            return json.loads(text)
        except ValueError:
            return text
    try:
        return parse_value(text, type(before))
    except (ValueError, KeyError):
        simple = type(before) in (bool, int, float)
        raise ConfigError(where, found=repr(text), expected=TYPES.get(type(before), type(before).__name__),
                          remedy="" if simple else "Write such a value into a config.json") from None


def _sizes(decoder: Decoder) -> dict[str, Any]:
    """Return the sizes that the rest of the program asks for; 0 for those that the architecture does not have."""
    config = decoder.model.config.get_text_config(decoder=True)
    rows, columns = decoder.model.get_input_embeddings().weight.shape
    rows = min(rows, decoder.model.get_output_embeddings().weight.shape[0])  # Moshi has one more embedding
    hidden, heads = first_size(config, ("hidden_size",), columns), first_size(config, _HEADS, 0)
    return {"vocab_size": rows, "hidden_size": hidden, "num_layers": len(decoder.parts.blocks), "num_heads": heads,
            "num_kv_heads": first_size(config, ("num_key_value_heads",), heads),
            "head_size": first_size(config, ("head_dim",), hidden // heads) if heads else 0,
            "intermediate_size": first_size(config, ("intermediate_size", "ffn_dim", "n_inner"), 0),
            "max_positions": first_size(config, _POSITIONS, _NO_LIMIT)}


def _key_names(decoder: Decoder) -> dict[str, str]:
    """Return the keys of the config.json for fields of ModelConfig, where they differ."""
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
             "num_kv_heads": "num_key_value_heads", "head_size": "head_dim", "max_positions": "max_position_embeddings"}
    theirs = type(decoder.model.config).attribute_map
    return {ours: theirs.get(key, key) for ours, key in names.items()}
