"""Read a transformers config.json of any supported architecture into one dataclass.

A new architecture needs a reader here, its keys in architecture_keys.py, and its tensor names in hf_weights.py.
This file imports neither torch nor transformers, so that a run is validated in well under a second.
"""

import copy
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.architecture_keys import (
    KEY_NAMES,
    KEYS,
    check_model_keys,
    check_model_types,
    listing,
    parse_overrides,
    read_config_json,
)

PRESETS = Path(__file__).parent / "presets"
# name in transformers -> our name
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu",
                "swish": "silu"}

# Upper limits, far beyond any model. They prevent lists or tables of absurd size.
_LARGEST = {"vocab_size": 2**24, "hidden_size": 2**20, "num_layers": 10**5, "num_heads": 2**20, "num_kv_heads": 2**20,
            "head_size": 2**20, "intermediate_size": 2**24, "max_positions": 2**31 - 1, "norm_eps": 1.0}
_LARGEST_TABLE = 2**24  # learned positions
_LARGEST_THETA = 1e12
_OTHER_ARCHITECTURES = ("gpt_neo", "gptj", "gpt_j", "llama4")  # other architectures, not misspellings


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are numbers of elements, dropouts are probabilities."""

    architecture: str  # "gpt2", "gpt_neox" or "llama": format of the config.json, and names of weights in an export
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_positions: int  # tokens
    norm: str  # "layernorm" (weight and bias) or "rmsnorm" (weight)
    norm_eps: float
    activation: str  # "gelu", "gelu_tanh" or "silu"
    gated_mlp: bool  # activation(gate(x)) * up(x) instead of activation(up(x))
    position: str  # "learned" or "rope"
    rope_theta: float
    rotary_size: int  # number of elements of a head that rotate, from the first; 0 with learned positions
    rope_scaling: dict[str, Any] | None  # {"rope_type": "linear" | "llama3", "factor": ...}
    parallel_residual: bool  # x + attention(norm1(x)) + mlp(norm2(x))
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    embedding_dropout: float
    attention_dropout: float
    residual_dropout: float
    initializer_range: float  # standard deviation of the initial matrices
    scale_residual_init: bool  # divide by sqrt(2 * num_layers) for projections into the residual stream
    hf_config: dict[str, Any]  # the config.json with overrides applied

    def key(self, field: str) -> str:
        """Return the config.json key of a field, such as `n_layer` for `num_layers` of gpt2."""
        return KEY_NAMES[self.architecture].get(field, field)

    def layer_parameters(self) -> int:
        """Return the number of parameters of one block."""
        norm = self.hidden_size * (2 if self.norm == "layernorm" else 1)
        heads = self.num_heads * self.head_size
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        attention = self.hidden_size * (qkv + heads) + self.qkv_bias * qkv + self.attention_out_bias * self.hidden_size
        inner = 2 if self.gated_mlp else 1
        mlp = (inner + 1) * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (inner * self.intermediate_size + self.hidden_size)
        return 2 * norm + attention + mlp

    def num_parameters(self) -> int:
        """Return the number of all parameters; a tied matrix counts once."""
        final_norm = self.hidden_size * (2 if self.norm == "layernorm" else 1)
        vocab = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        positions = self.max_positions * self.hidden_size if self.position == "learned" else 0
        return vocab + positions + self.num_layers * self.layer_parameters() + final_norm


def preset_names() -> list[str]:
    """Return the names of the presets that `--model` accepts."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def find_config(model: str) -> Path:
    """Return the path of the config.json that a preset's name, a file or a folder selects. Raises ConfigError."""
    preset = PRESETS / f"{model}.json"
    if model in preset_names():
        return preset
    folder = os.path.isdir(model)
    path = Path(model, "config.json") if folder else Path(model)
    if os.path.isfile(path):
        return path
    if folder or "/" in model or model.endswith(".json"):
        raise ConfigError(f"--model {shorten(model)}", problem=f"there is no file {shorten(str(path))}",
                          remedy="give a preset's name, a transformers config.json, or the folder that holds one")
    names = preset_names()
    raise ConfigError("--model", found=repr(model), expected=f"a config.json, its folder, or one of {', '.join(names)}",
                      word=model, known=names)


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
    path = find_config(model)
    where = f"--model {model}" if path.parent == PRESETS else str(path)
    return model_config_from(read_config_json(path), where, overrides)


def model_config_from(values: dict[str, Any], where: str, overrides: str | None = None) -> ModelConfig:
    """Return the model config for a config.json's content. `where` names the file in errors. Raises ConfigError."""
    architecture = values.get("model_type")
    if not isinstance(architecture, str) or architecture not in _READERS:
        found = "nothing" if architecture is None else json.dumps(architecture)
        raise ConfigError(f"{where}: model_type", found=found, expected=f"one of {listing(_READERS)}",
                          word=_architecture_name(str(architecture)), known=_READERS)
    check_model_keys(values, architecture, where)
    changed = parse_overrides(overrides, architecture, values) if overrides else {}
    values = {**values, **changed}
    check_model_keys(values, architecture, "--model_overrides" if changed else where)
    check_model_types(values, architecture, where)
    complete = {**KEYS[architecture], **values}
    config = ModelConfig(architecture=architecture, hf_config=copy.deepcopy(values),
                         **_READERS[architecture](complete, where))
    _check_sizes(config, where)
    return config


def _architecture_name(word: str) -> str:
    """Return "gpt_neox" for GPT-NeoX; "" for the name of another architecture, such as gpt_neo."""
    name = word.lower().replace("-", "_")
    return "" if name in _OTHER_ARCHITECTURES else name


def _activation(name: str, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise ConfigError(where, found=repr(name), expected=f"one of {listing(_ACTIVATIONS)}",
                          word=name, known=_ACTIVATIONS)
    return _ACTIVATIONS[name]


def _ratio(total: int, parts: int) -> int:
    return total // parts if parts > 0 else 0  # _check_sizes rejects the 0


def _gpt2(values: dict[str, Any], where: str) -> dict[str, Any]:
    head_size = _ratio(values["n_embd"], values["n_head"])
    inner = values["n_inner"]
    return {
        "vocab_size": values["vocab_size"], "hidden_size": values["n_embd"], "num_layers": values["n_layer"],
        "num_heads": values["n_head"], "num_kv_heads": values["n_head"], "head_size": head_size,
        "intermediate_size": 4 * values["n_embd"] if inner is None else inner,
        "max_positions": values["n_positions"], "norm": "layernorm", "norm_eps": values["layer_norm_epsilon"],
        "activation": _activation(values["activation_function"], f"{where}: activation_function"),
        "gated_mlp": False, "position": "learned", "rope_theta": 0.0, "rotary_size": 0, "rope_scaling": None,
        "parallel_residual": False, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
        "tie_word_embeddings": values["tie_word_embeddings"], "embedding_dropout": values["embd_pdrop"],
        "attention_dropout": values["attn_pdrop"], "residual_dropout": values["resid_pdrop"],
        "initializer_range": values["initializer_range"], "scale_residual_init": True,
    }


def _gpt_neox(values: dict[str, Any], where: str) -> dict[str, Any]:
    head_size = _ratio(values["hidden_size"], values["num_attention_heads"])
    rope = _rope(values, where, theta_key="rotary_emb_base", fraction_key="rotary_pct", head_size=head_size)
    bias = values["attention_bias"]
    return {
        "vocab_size": values["vocab_size"], "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"], "num_heads": values["num_attention_heads"],
        "num_kv_heads": values["num_attention_heads"], "head_size": head_size,
        "intermediate_size": values["intermediate_size"], "max_positions": values["max_position_embeddings"],
        "norm": "layernorm", "norm_eps": values["layer_norm_eps"],
        "activation": _activation(values["hidden_act"], f"{where}: hidden_act"), "gated_mlp": False,
        "position": "rope", **rope, "parallel_residual": values["use_parallel_residual"], "qkv_bias": bias,
        "attention_out_bias": bias, "mlp_bias": True, "tie_word_embeddings": values["tie_word_embeddings"],
        "embedding_dropout": values["hidden_dropout"], "attention_dropout": values["attention_dropout"] or 0.0,
        "residual_dropout": values["hidden_dropout"], "initializer_range": values["initializer_range"],
        "scale_residual_init": False,
    }


def _llama(values: dict[str, Any], where: str) -> dict[str, Any]:
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_size = _ratio(values["hidden_size"], heads) if values["head_dim"] is None else values["head_dim"]
    bias = values["attention_bias"]
    return {
        "vocab_size": values["vocab_size"], "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"], "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads, "head_size": head_size,
        "intermediate_size": values["intermediate_size"], "max_positions": values["max_position_embeddings"],
        "norm": "rmsnorm", "norm_eps": values["rms_norm_eps"],
        "activation": _activation(values["hidden_act"], f"{where}: hidden_act"), "gated_mlp": True,
        "position": "rope", **_rope(values, where, theta_key="rope_theta", fraction_key=None, head_size=head_size),
        "parallel_residual": False, "qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": values["mlp_bias"],
        "tie_word_embeddings": values["tie_word_embeddings"], "embedding_dropout": 0.0,
        "attention_dropout": values["attention_dropout"] or 0.0, "residual_dropout": 0.0,
        "initializer_range": values["initializer_range"], "scale_residual_init": False,
    }


_READERS = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama}


def _rope(values: dict[str, Any], where: str, *, theta_key: str, fraction_key: str | None,
          head_size: int) -> dict[str, Any]:
    """Return the rotary fields, from the older keys (rope_theta, rope_scaling, rotary_pct ...) or `rope_parameters`."""
    if values["rope_scaling"] and values["rope_parameters"]:
        raise ConfigError(f"{where}: rope_scaling", problem="the config also has rope_parameters",
                          remedy="keep one of them")
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    nested = dict(values[key] or {})
    for name, value in nested.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in ("type", "rope_type") and not isinstance(value, str):
            raise ConfigError(f"{where}: {key}.{name}", found=json.dumps(value), expected='a string such as "linear"')
        if name in ("rope_theta", "partial_rotary_factor") and value is not None and not number:
            raise ConfigError(f"{where}: {key}.{name}", found=json.dumps(value), expected="a number")
    names = {name: f"{key}.{name}" for name in ("rope_theta", "partial_rotary_factor") if nested.get(name) is not None}
    theta = nested.pop("rope_theta", None)
    if theta is None:
        theta = 10000.0 if values[theta_key] is None else values[theta_key]
    fraction = nested.pop("partial_rotary_factor", None)
    if fraction is None:
        fraction = values[fraction_key] if fraction_key else 1.0
    if fraction_key is None and fraction != 1.0:
        raise ConfigError(f"{where}: {key}.partial_rotary_factor", found=fraction, expected="1.0 for this architecture")
    if not 0 < theta <= _LARGEST_THETA:
        raise ConfigError(f"{where}: {names.get('rope_theta', theta_key)}", found=theta,
                          expected=f"a number above 0, up to {_LARGEST_THETA:g}")
    if not 0 < fraction <= 1:
        raise ConfigError(f"{where}: {names.get('partial_rotary_factor', fraction_key)}", found=fraction,
                          expected="a fraction above 0, up to 1")
    for name, resolved in (("rope_theta", theta), ("partial_rotary_factor", fraction)):  # gpt_neox may have both
        if values.get(name) is not None and name != theta_key and values[name] != resolved:
            raise ConfigError(f"{where}: {name}", found=values[name],
                              expected=f"{resolved}, as in the other rotary keys of this file")
    scaling = _rope_scaling(nested, f"{where}: {key}", values["max_position_embeddings"])
    return {"rope_theta": float(theta), "rotary_size": int(head_size * fraction), "rope_scaling": scaling}


def _rope_scaling(nested: dict[str, Any], where: str, max_positions: int) -> dict[str, Any] | None:
    """Return the checked scaling of rotary positions; None without scaling."""
    nested = dict(nested)
    old_key = nested.pop("type", "default")
    kind = nested.pop("rope_type", old_key)
    wanted = {"default": [], "linear": ["factor"],
              "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
    if kind not in wanted:
        raise ConfigError(f"{where}.rope_type", found=repr(kind), expected=f"one of {listing(wanted)}")
    if kind == "llama3":
        nested.setdefault("original_max_position_embeddings", max_positions)
    for name in sorted(set(nested) ^ set(wanted[kind])):
        problem = "this is not a known key" if name in nested else "it is missing"
        raise ConfigError(f"{where}.{shorten(name)}", problem=problem,
                          remedy=f"{kind} has the keys {listing(wanted[kind]) or 'rope_type'}")
    for name, value in nested.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{where}.{name}", found=json.dumps(value), expected="a number above 0")
    if kind == "llama3" and nested["high_freq_factor"] <= nested["low_freq_factor"]:
        raise ConfigError(f"{where}.high_freq_factor", found=nested["high_freq_factor"],
                          expected=f"more than low_freq_factor ({nested['low_freq_factor']})")
    return None if kind == "default" else {"rope_type": kind, **nested}


def _check_sizes(config: ModelConfig, where: str) -> None:
    """Raise ConfigError for sizes that are out of range or do not divide each other as required."""
    for field, largest in _LARGEST.items():
        value = getattr(config, field)
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
    for multiple, divisor in (("hidden_size", "num_heads"), ("num_heads", "num_kv_heads")):
        if getattr(config, multiple) % getattr(config, divisor):
            raise ConfigError(f"{where}: {config.key(multiple)}", found=getattr(config, multiple),
                              expected=f"a multiple of {config.key(divisor)} ({getattr(config, divisor)})")
    if config.position == "rope" and not (0 < config.rotary_size <= config.head_size and config.rotary_size % 2 == 0):
        raise ConfigError(f"{where}: {config.key('rotary_size')}", found=f"{config.rotary_size} rotary elements a head",
                          expected=f"an even number from 2 to the head size ({config.head_size})")
