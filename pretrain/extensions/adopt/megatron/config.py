"""Make a transformers config.json from the settings that GPT-NeoX and Megatron-DeepSpeed store in a checkpoint.

GPT-NeoX copies its YAML files to the folder configs/ of a checkpoint (megatron/checkpointing.py, save_ds_checkpoint);
what they leave out has the defaults of megatron/neox_arguments/neox_args.py. Megatron-DeepSpeed stores all its
arguments. Where no family of transformers computes the same, --model is required, so that nothing is guessed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.megatron.layer_files import EnumValue

Values = dict[str, Any]
_NEED_MODEL = "name a config.json that describes the model by --model"
_LARGEST_YAML = 2**20  # bytes
# settings of GPT-NeoX that change the model -> values with which it is a model of transformers
_NEOX_REQUIRED: Values = {
    "gpt_j_tied": (False,), "use_mup": (False,), "use_qk_layernorm": (False,), "sliding_window_width": (None,),
    "opt_pos_emb_offset": (0, None), "moe_num_experts": (1, None), "soft_prompt_tuning": (None,),
    "train_impl": ("normal",), "onnx_safe": (False,),
}
_NEOX_DEFAULTS: Values = {
    "pos_emb": "learned", "norm": "layernorm", "activation": "gelu", "rotary_pct": 1.0, "rotary_emb_base": 10000,
    "layernorm_epsilon": 1e-5, "rms_norm_epsilon": 1e-8, "gpt_j_residual": False, "no_weight_tying": False,
    "use_bias_in_attn_linear": True, "use_bias_in_mlp": True, "bias_gelu_fusion": False, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.02, "num_kv_heads": None, **{
        name: allowed[0] for name, allowed in _NEOX_REQUIRED.items()},
}
_SOFTMAX_ATTENTION = ("global", "flash")


def read_neox_settings(folder: Path) -> Values | None:
    """Return the merged content of the YAML files in configs/, with underscores in the keys; None: there are none.

    Raises ConfigError for files that cannot be read, and for a key with different values in two files.
    """
    merged: Values = {}
    paths = sorted(path for path in (folder / "configs").glob("*") if path.suffix in (".yml", ".yaml"))
    for path in paths:
        try:
            if path.stat().st_size > _LARGEST_YAML:
                raise ValueError("it is too large")
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it is no mapping")
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(str(path), problem=f"it cannot be read: {shorten(' '.join(str(error).split()))}",
                              remedy="copy the file again") from None
        for key, value in content.items():
            name = str(key).replace("-", "_")
            if name in merged and merged[name] != value:
                raise ConfigError(f"{path}: {key}", found=value, expected=f"{merged[name]}, as in another file of "
                                  "configs/", remedy=_NEED_MODEL)
            merged[name] = value
    return merged if paths else None


def neox_config(settings: Mapping[str, Any], where: str, *, vocab_size: int, intermediate_size: int) -> Values:
    """Return a config.json for the settings of GPT-NeoX. Raises ConfigError.

    Args:
        vocab_size: rows of the embedding.
        intermediate_size: inner size of the MLP, from the shapes: the settings give only a bound of it.
    """
    values = {**_NEOX_DEFAULTS, **{name: value for name, value in settings.items() if value is not None}}
    for name, allowed in _NEOX_REQUIRED.items():
        if values[name] not in allowed:
            _reject(where, f"{name} is {values[name]}")
    _check_attention(values.get("attention_config"), where)
    sizes = _sizes(values, where, "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    kind = (values["norm"], values["pos_emb"], values["activation"] == "swiglu")
    biases = bool(values["use_bias_in_attn_linear"]), bool(values["use_bias_in_mlp"])
    grouped = values["num_kv_heads"] not in (None, sizes["num_attention_heads"])
    common = {"vocab_size": vocab_size, "tie_word_embeddings": not values["no_weight_tying"],
              "initializer_range": float(values["init_method_std"])}
    dropouts = float(values["hidden_dropout"]), float(values["attention_dropout"])
    if kind == ("layernorm", "rotary", False) and biases[1] and not grouped:
        return {"model_type": "gpt_neox", **common, **_hidden_sizes(sizes), "intermediate_size": intermediate_size,
                "rotary_pct": float(values["rotary_pct"]), "rotary_emb_base": float(values["rotary_emb_base"]),
                "layer_norm_eps": float(values["layernorm_epsilon"]), "attention_bias": biases[0],
                "use_parallel_residual": bool(values["gpt_j_residual"]),
                "hidden_act": _neox_activation(values, where, "gelu_fast"), "hidden_dropout": dropouts[0],
                "attention_dropout": dropouts[1]}
    parallel = bool(values["gpt_j_residual"])
    if kind == ("layernorm", "learned", False) and biases == (True, True) and not grouped and not parallel:
        return _gpt2(common, sizes, intermediate_size, dropouts, float(values["layernorm_epsilon"]),
                     _neox_activation(values, where, "gelu_new"))
    if kind == ("rmsnorm", "rotary", True) and float(values["rotary_pct"]) == 1 and not dropouts[0] and not parallel:
        return {**_llama(common, sizes, intermediate_size, values["num_kv_heads"]),
                "rope_theta": float(values["rotary_emb_base"]), "rms_norm_eps": float(values["rms_norm_epsilon"]),
                "attention_bias": biases[0], "mlp_bias": biases[1], "attention_dropout": dropouts[1]}
    return _reject(where, f"norm {kind[0]}, pos_emb {kind[1]}, activation {values['activation']}, biases of attention "
                   f"and MLP {biases[0]} and {biases[1]}, rotary_pct {values['rotary_pct']}, num_kv_heads "
                   f"{values['num_kv_heads']}, gpt_j_residual {parallel} and hidden_dropout {dropouts[0]}")


def _neox_activation(values: Mapping[str, Any], where: str, tanh: str) -> str:
    """Return the name in transformers. The fused gelu is the approximation by tanh (megatron/model/activations.py)."""
    name = values["activation"]
    if name == "gelu":
        return tanh if values["bias_gelu_fusion"] else "gelu"
    return {"relu": "relu", "silu": "silu", "swish": "silu"}.get(name) or str(_reject(where, f"activation is {name}"))


def _check_attention(given: Any, where: str) -> None:
    """Raise ConfigError unless all blocks have attention over all earlier tokens: [[["flash"], 12]] or a flat list."""
    names = {each for each in _leaves(given) if isinstance(each, str)} - {"all"}
    if names - {*_SOFTMAX_ATTENTION}:
        _reject(where, f"attention_config has {', '.join(sorted(names))}")


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list) else [value]


def megatron_config(args: Mapping[str, Any], where: str, *, vocab_size: int, intermediate_size: int) -> Values:
    """Return a config.json for the arguments of Megatron-DeepSpeed. Raises ConfigError. Sizes as in `neox_config`."""
    sizes = _sizes(args, where, "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    for name, allowed in {"apply_layernorm_1p": (None, False), "glu_activation": (None,), "kv_channels":
                          (None, sizes["hidden_size"] // max(1, sizes["num_attention_heads"]))}.items():
        if args.get(name) not in allowed:
            _reject(where, f"{name} is {args.get(name)}")
    position, norm = _position(args, where), args.get("normalization", "layernorm")
    tied = not args.get("untie_embeddings_and_output_weights", False)
    common = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "initializer_range": float(args.get(
        "init_method_std", 0.02))}
    dropouts = float(args.get("hidden_dropout", 0.0)), float(args.get("attention_dropout", 0.0))
    kv_heads, has_bias = args.get("num_key_value_heads"), args.get("add_bias_linear", True)
    grouped = kv_heads not in (None, sizes["num_attention_heads"])
    eps, gated = float(args.get("layernorm_epsilon", 1e-5)), bool(args.get("swiglu"))
    if (norm, position, gated) == ("rmsnorm", "rotary", True) and not has_bias and not dropouts[0] \
            and args.get("rotary_percent", 1.0) == 1:
        return {**_llama(common, sizes, intermediate_size, kv_heads), "rms_norm_eps": eps,
                "rope_theta": float(args.get("rope_theta", 10000)), "attention_dropout": dropouts[1]}
    if norm == "layernorm" and not gated and has_bias and not grouped:
        activation = _megatron_activation(args)
        if position == "learned" and not args.get("embed_layernorm"):
            return _gpt2(common, sizes, intermediate_size, dropouts, eps, activation)
        if position == "rotary":
            return {"model_type": "gpt_neox", **common, **_hidden_sizes(sizes), "intermediate_size": intermediate_size,
                    "rotary_pct": float(args.get("rotary_percent", 1.0)), "layer_norm_eps": eps,
                    "rotary_emb_base": float(args.get("rope_theta", 10000)), "use_parallel_residual": False,
                    "hidden_act": activation, "hidden_dropout": dropouts[0], "attention_dropout": dropouts[1]}
        if position == "alibi" and args.get("embed_layernorm") and tied and activation == "gelu_new" \
                and intermediate_size == 4 * sizes["hidden_size"]:
            return {"model_type": "bloom", **common, "hidden_size": sizes["hidden_size"],
                    "n_layer": sizes["num_layers"], "n_head": sizes["num_attention_heads"],
                    "seq_length": int(args.get("seq_length") or sizes["max_position_embeddings"]),
                    "layer_norm_epsilon": eps, "hidden_dropout": dropouts[0], "attention_dropout": dropouts[1]}
    return _reject(where, f"normalization {norm}, positions {position}, swiglu {gated}, add_bias_linear {has_bias}, "
                   f"num_key_value_heads {kv_heads}, embed_layernorm {bool(args.get('embed_layernorm'))} and "
                   f"hidden_dropout {dropouts[0]}")


def _position(args: Mapping[str, Any], where: str) -> str:
    """Return "learned", "rotary" or "alibi". BigScience's version has an enumeration of them, and others two flags."""
    given = args.get("position_embedding_type")
    if isinstance(given, EnumValue):
        positions = {1: "rotary", 2: "learned", 3: "alibi", "rotary": "rotary", "absolute": "learned", "alibi": "alibi"}
        return positions.get(given.value) or str(_reject(where, f"position_embedding_type is {given.value}"))
    if args.get("use_rotary_position_embeddings"):
        return "rotary"
    return "learned" if args.get("add_position_embedding", True) else "none"


def _megatron_activation(args: Mapping[str, Any]) -> str:
    """Return the name in transformers. The fused gelu is the approximation by tanh (fused_bias_gelu.py)."""
    if args.get("openai_gelu"):
        return "gelu_new"
    if args.get("squared_relu"):
        return "relu2"
    return "gelu_new" if args.get("bias_gelu_fusion") and not args.get("onnx_safe") else "gelu"


def _sizes(values: Mapping[str, Any], where: str, *names: str) -> dict[str, int]:
    for name in names:
        if type(values.get(name)) is not int or values[name] < 1:
            raise ConfigError(f"{where}: {name}", found=values.get(name, "nothing"), expected="a number above 0",
                              remedy=_NEED_MODEL)
    return {name: values[name] for name in names}


def _hidden_sizes(sizes: Mapping[str, int]) -> Values:
    return {"hidden_size": sizes["hidden_size"], "num_hidden_layers": sizes["num_layers"],
            "num_attention_heads": sizes["num_attention_heads"],
            "max_position_embeddings": sizes["max_position_embeddings"]}


def _gpt2(common: Values, sizes: Mapping[str, int], inner: int, dropouts: tuple[float, float], eps: float,
          activation: str) -> Values:
    return {"model_type": "gpt2", **common, "n_embd": sizes["hidden_size"], "n_layer": sizes["num_layers"],
            "n_head": sizes["num_attention_heads"], "n_positions": sizes["max_position_embeddings"], "n_inner": inner,
            "activation_function": activation, "embd_pdrop": dropouts[0], "resid_pdrop": dropouts[0],
            "attn_pdrop": dropouts[1], "layer_norm_epsilon": eps}


def _llama(common: Values, sizes: Mapping[str, int], inner: int, kv_heads: int | None) -> Values:
    return {"model_type": "llama", **common, **_hidden_sizes(sizes), "intermediate_size": inner, "hidden_act": "silu",
            "num_key_value_heads": kv_heads or sizes["num_attention_heads"]}


def _reject(where: str, what: str) -> Values:
    raise ConfigError(where, problem=f"{what}: no family of transformers that this program trains is known to compute "
                      "the same", remedy=_NEED_MODEL)


# arguments of Megatron Core that change the model -> values with which it is a model of transformers
_CORE_REQUIRED: Values = {
    "num_experts": (None, 0), "multi_latent_attention": (None, False), "rotary_interleaved": (None, False),
    "rotary_seq_len_interpolation_factor": (None,), "window_size": (None,),
    "layernorm_zero_centered_gamma": (None, False),
    "apply_layernorm_1p": (None, False), "no_rope_freq": (None,), "softmax_type": (None, "vanilla"),
    "mtp_num_layers": (None, 0), "qk_l2_norm": (None, False), "attention_output_gate": (None, False),
    "heterogeneous_layers_config_path": (None,), "use_kitchen": (None, False), "glu_linear_offset": (None, 0.0),
}
# megatron/core/models/common/embeddings/rotary_pos_embedding.py
_LLAMA3_SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}


def megatron_core_config(args: Mapping[str, Any], where: str, *, vocab_size: int) -> Values:
    """Return a config.json for arguments of Megatron Core. Raises ConfigError. `vocab_size`: as in `neox_config`."""
    for name, allowed in _CORE_REQUIRED.items():
        if args.get(name) not in allowed:
            _reject(where, f"{name} is {args.get(name)}")
    sizes = _sizes(args, where, "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings",
                   "ffn_hidden_size")
    inner, heads = sizes.pop("ffn_hidden_size"), sizes["num_attention_heads"]
    kv_heads = args.get("num_query_groups") if args.get("group_query_attention") else heads
    head_size = args.get("kv_channels") or sizes["hidden_size"] // heads
    norm, position, swiglu = args.get("normalization"), args.get("position_embedding_type"), bool(args.get("swiglu"))
    biases, qkv_bias, qk_norm = (bool(args.get(name)) for name in ("add_bias_linear", "add_qkv_bias", "qk_layernorm"))
    eps = float(args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)))
    dropouts = float(args.get("hidden_dropout") or 0.0), float(args.get("attention_dropout") or 0.0)
    common = {"vocab_size": vocab_size, "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights"),
              "initializer_range": float(args.get("init_method_std", 0.02))}
    if (norm, position, swiglu, biases) == ("RMSNorm", "rope", True, False) and not dropouts[0] \
            and args.get("rotary_percent", 1.0) == 1 and not (qkv_bias and qk_norm):
        theta = {"rope_theta": float(args.get("rotary_base", 10000)), **({"rope_scaling": {
            **_LLAMA3_SCALING, "factor": float(args.get("rope_scaling_factor", 8.0))}} if args.get("use_rope_scaling")
            else {})}
        kind = "qwen3" if qk_norm else "qwen2" if qkv_bias else "llama"
        if kind == "qwen2" and head_size * heads != sizes["hidden_size"]:
            _reject(where, f"kv_channels is {head_size} with add_qkv_bias")
        return {**_llama(common, sizes, inner, kv_heads), **theta, "model_type": kind, "rms_norm_eps": eps,
                "attention_dropout": dropouts[1], **({} if kind == "qwen2" else {"head_dim": head_size})}
    if (norm, position, swiglu, biases) == ("LayerNorm", "learned_absolute", False, True) and kv_heads == heads \
            and not qk_norm and head_size * heads == sizes["hidden_size"]:
        return _gpt2(common, sizes, inner, dropouts, eps, _megatron_activation(args))
    return _reject(where, f"normalization {norm}, position_embedding_type {position}, swiglu {swiglu}, add_bias_linear "
                   f"{biases}, add_qkv_bias {qkv_bias}, qk_layernorm {qk_norm}, num_query_groups {kv_heads}, "
                   f"hidden_dropout {dropouts[0]} and rotary_percent {args.get('rotary_percent')}")
