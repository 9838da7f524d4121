"""Read a config.json without a family of ours into a ModelConfig. Imports transformers and torch, in seconds."""

import copy
from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.description import ModelConfig
from pretrain.model.general.decoder import Decoder, decoder_from
from pretrain.model.general.parts import UnknownPartsError

# attributes of transformers' configs with the values of fields of ModelConfig
_HEADS = ("num_attention_heads", "num_heads", "n_head")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_NO_LIMIT = 2**31 - 1  # tokens


def general_config(values: dict[str, Any], where: str) -> ModelConfig:
    """Return the config with its layers. `where` names the file in errors. Raises ConfigError."""
    try:
        decoder = decoder_from(values)
    except UnknownPartsError as error:
        raise ConfigError(f"{where}: model_type", problem=f"{values['model_type']} is not a stack of decoder layers "
                          f"that can be trained layer by layer: {error}",
                          remedy="train a model of another architecture") from None
    return ModelConfig(
        architecture=values["model_type"], hf_config=copy.deepcopy(values), key_names=_key_names(decoder),
        tie_word_embeddings=decoder.parts.tied, described=decoder.layers, **_sizes(decoder),
        norm="", norm_eps=0.0, activation="", gated_mlp=False, position="", initializer_range=0.0)


def _sizes(decoder: Decoder) -> dict[str, Any]:
    """Return the sizes that the rest of the program asks for; 0 for those that the architecture does not have."""
    config = decoder.model.config.get_text_config(decoder=True)
    rows, hidden = decoder.model.get_input_embeddings().weight.shape
    heads = _first(config, _HEADS, 0)
    return {"vocab_size": rows, "hidden_size": hidden, "num_layers": len(decoder.parts.blocks), "num_heads": heads,
            "num_kv_heads": _first(config, ("num_key_value_heads",), heads),
            "head_size": _first(config, ("head_dim",), hidden // heads if heads else 0),
            "intermediate_size": _first(config, ("intermediate_size", "ffn_dim", "n_inner"), 0),
            "max_positions": _first(config, _POSITIONS, _NO_LIMIT)}


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """Return the first attribute that is a positive whole number."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), default)


def _key_names(decoder: Decoder) -> dict[str, str]:
    """Return the keys of the config.json for fields of ModelConfig, where they differ."""
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
             "num_kv_heads": "num_key_value_heads", "head_size": "head_dim", "max_positions": "max_position_embeddings"}
    theirs = type(decoder.model.config).attribute_map
    return {ours: theirs.get(key, key) for ours, key in names.items()}
