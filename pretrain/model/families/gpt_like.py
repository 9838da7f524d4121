"""GPT-2 and the families that resemble it: GPT-J, GPT-NeoX, Phi and BLOOM. They have LayerNorm, and no gate."""

from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.families.family import Family, Names, Values, activation, ratio, separate_qkv
from pretrain.model.families.position_keys import read_rope


def _read_gpt2(values: Values, where: str) -> dict[str, Any]:
    """GPT-2: learned positions, LayerNorm, biases everywhere."""
    inner = values["n_inner"]
    return {
        "vocab_size": values["vocab_size"], "hidden_size": values["n_embd"], "num_layers": values["n_layer"],
        "num_heads": values["n_head"], "num_kv_heads": values["n_head"],
        "head_size": ratio(values["n_embd"], values["n_head"]),
        "intermediate_size": 4 * values["n_embd"] if inner is None else inner,
        "max_positions": values["n_positions"], "norm": "layernorm", "norm_eps": values["layer_norm_epsilon"],
        "activation": activation(values["activation_function"], f"{where}: activation_function"),
        "gated_mlp": False, "position": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
        "tie_word_embeddings": values["tie_word_embeddings"], "embedding_dropout": values["embd_pdrop"],
        "attention_dropout": values["attn_pdrop"], "residual_dropout": values["resid_pdrop"],
        "initializer_range": values["initializer_range"], "scale_residual_init": True,
    }


_GPT2_NAMES = Names(
    prefix="transformer.", embedding="wte", positions="wpe", blocks="h", final_norm="ln_f", transposed=True,
    block={"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2",
           "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})
GPT2 = Family(
    keys={
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
    },
    key_names={
        "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "max_positions": "n_positions",
        "intermediate_size": "n_inner", "activation": "activation_function", "norm_eps": "layer_norm_epsilon",
        "embedding_dropout": "embd_pdrop", "residual_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop",
    },
    # in the published configs of GPT-2 medium, large and XL; transformers does not use them
    ignored=frozenset({"n_special", "predict_special_tokens", "output_past"}),
    read=_read_gpt2, names=_GPT2_NAMES)


def _read_gptj(values: Values, where: str) -> dict[str, Any]:
    """GPT-J: attention and MLP share one norm, positions rotate a part of each head, a bias of the head."""
    inner, hidden, heads = values["n_inner"], values["n_embd"], values["n_head"]
    return {
        "vocab_size": values["vocab_size"], "hidden_size": hidden, "num_layers": values["n_layer"],
        "num_heads": heads, "num_kv_heads": heads, "head_size": ratio(hidden, heads),
        "intermediate_size": 4 * hidden if inner is None else inner, "max_positions": values["n_positions"],
        "norm": "layernorm", "norm_eps": values["layer_norm_epsilon"],
        "activation": activation(values["activation_function"], f"{where}: activation_function"),
        "gated_mlp": False, "position": "rope", "rope_theta": 10000.0, "rotary_size": values["rotary_dim"],
        "parallel_residual": True, "shared_norm": True, "qkv_bias": False, "attention_out_bias": False,
        "mlp_bias": True, "head_bias": True, "tie_word_embeddings": False, "embedding_dropout": values["embd_pdrop"],
        "attention_dropout": values["attn_pdrop"], "residual_dropout": values["resid_pdrop"],
        "initializer_range": values["initializer_range"], "scale_residual_init": False,
    }


# transformers rotates pairs of neighbouring elements of a head (models/gptj/modeling_gptj.py, rotate_every_two), and
# this project the elements i and i + rotary_size / 2. So the rows of the query and key matrices are reordered.
_GPTJ_NAMES = Names(
    prefix="transformer.", embedding="wte", blocks="h", final_norm="ln_f", qkv_row_order="rotary_neighbours",
    block={"norm1": "ln_1", "attention.qkv": separate_qkv("attn"), "attention.out": "attn.out_proj",
           "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out"})
GPTJ = Family(
    keys={
        "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
        "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    },
    # a tied matrix would be shared with the embedding, which has no bias
    fixed={"rotary": True, "tie_word_embeddings": False},
    key_names={
        "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "max_positions": "n_positions",
        "intermediate_size": "n_inner", "activation": "activation_function", "norm_eps": "layer_norm_epsilon",
        "rotary_size": "rotary_dim", "embedding_dropout": "embd_pdrop", "residual_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    read=_read_gptj, names=_GPTJ_NAMES)


def _read_gpt_neox(values: Values, where: str) -> dict[str, Any]:
    """GPT-NeoX and Pythia: parallel residual, positions rotate a part of each head."""
    head_size = ratio(values["hidden_size"], values["num_attention_heads"])
    bias = values["attention_bias"]
    return {
        "vocab_size": values["vocab_size"], "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"], "num_heads": values["num_attention_heads"],
        "num_kv_heads": values["num_attention_heads"], "head_size": head_size,
        "intermediate_size": values["intermediate_size"], "max_positions": values["max_position_embeddings"],
        "norm": "layernorm", "norm_eps": values["layer_norm_eps"],
        "activation": activation(values["hidden_act"], f"{where}: hidden_act"), "gated_mlp": False, "position": "rope",
        **read_rope(values, where, theta_key="rotary_emb_base", fraction_key="rotary_pct", head_size=head_size),
        "parallel_residual": values["use_parallel_residual"], "qkv_bias": bias, "attention_out_bias": bias,
        "mlp_bias": True, "tie_word_embeddings": values["tie_word_embeddings"],
        "embedding_dropout": values["hidden_dropout"], "attention_dropout": values["attention_dropout"] or 0.0,
        "residual_dropout": values["hidden_dropout"], "initializer_range": values["initializer_range"],
        "scale_residual_init": False,
    }


_GPT_NEOX_NAMES = Names(
    prefix="gpt_neox.", embedding="embed_in", blocks="layers", final_norm="final_layer_norm",
    head_in_files="embed_out", qkv_row_order="head_major",
    block={"norm1": "input_layernorm", "attention.qkv": "attention.query_key_value",
           "attention.out": "attention.dense", "norm2": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
           "mlp.down": "mlp.dense_4h_to_h"})
GPT_NEOX = Family(
    keys={
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
        "partial_rotary_factor": None, "rope_theta": None, "rope_scaling": None, "rope_parameters": None,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": 2048,
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True,
    },
    # older names of the dropouts, in the published config of GPT-NeoX-20B; transformers does not use them
    fixed={"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    key_names={
        "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "activation": "hidden_act",
        "max_positions": "max_position_embeddings", "norm_eps": "layer_norm_eps", "rotary_size": "rotary_pct",
        "embedding_dropout": "hidden_dropout", "residual_dropout": "hidden_dropout",
        "parallel_residual": "use_parallel_residual",
    },
    read=_read_gpt_neox, names=_GPT_NEOX_NAMES)


def _read_phi(values: Values, where: str) -> dict[str, Any]:
    """Phi 1, 1.5 and 2: attention and MLP share one norm, positions rotate a part of each head."""
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_size = ratio(values["hidden_size"], heads)
    return {
        "vocab_size": values["vocab_size"], "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"], "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads, "head_size": head_size,
        "intermediate_size": values["intermediate_size"], "max_positions": values["max_position_embeddings"],
        "norm": "layernorm", "norm_eps": values["layer_norm_eps"],
        "activation": activation(values["hidden_act"], f"{where}: hidden_act"), "gated_mlp": False, "position": "rope",
        **read_rope(values, where, theta_key="rope_theta", fraction_key="partial_rotary_factor", head_size=head_size,
                    default_fraction=0.5),
        "parallel_residual": True, "shared_norm": True, "qkv_bias": True, "attention_out_bias": True,
        "mlp_bias": True, "head_bias": True, "tie_word_embeddings": False, "embedding_dropout": values["embd_pdrop"],
        "attention_dropout": values["attention_dropout"] or 0.0, "residual_dropout": values["resid_pdrop"],
        "initializer_range": values["initializer_range"], "scale_residual_init": False,
    }


_PHI_NAMES = Names(
    prefix="model.", embedding="embed_tokens", blocks="layers", final_norm="final_layernorm",
    block={"norm1": "input_layernorm", "attention.qkv": separate_qkv("self_attn"),
           "attention.out": "self_attn.dense", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"})
PHI = Family(
    keys={
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attention_dropout": 0.0, "hidden_act": "gelu_new", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
        "rope_parameters": None, "partial_rotary_factor": None,
    },
    # a tied matrix would be shared with the embedding, which has no bias
    fixed={"qk_layernorm": False, "tie_word_embeddings": False},
    nullable=frozenset({"attention_dropout"}),
    key_names={
        "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
        "activation": "hidden_act", "max_positions": "max_position_embeddings", "norm_eps": "layer_norm_eps",
        "rotary_size": "partial_rotary_factor", "embedding_dropout": "embd_pdrop", "residual_dropout": "resid_pdrop",
    },
    read=_read_phi, names=_PHI_NAMES)


# older name -> name; published files have the older ones
_OLDER_BLOOM_KEYS = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
_BLOOM_DEFAULTS = {"hidden_size": 64, "n_head": 8, "n_layer": 2}


def _bloom_size(values: Values, key: str, where: str) -> int:
    """Return the value of a key that has an older name."""
    older = next(name for name, now in _OLDER_BLOOM_KEYS.items() if now == key)
    given = [name for name in (key, older) if values[name] is not None]
    if len(given) == 2 and values[key] != values[older]:
        raise ConfigError(f"{where}: {older}", found=values[older], expected=f"{values[key]}, as {key}",
                          remedy="They are two names of one value")
    return int(values[given[0]]) if given else _BLOOM_DEFAULTS[key]


def _read_bloom(values: Values, where: str) -> dict[str, Any]:
    """BLOOM: ALiBi instead of positions, a norm after the embedding."""
    hidden, heads, layers = (_bloom_size(values, key, where) for key in ("hidden_size", "n_head", "n_layer"))
    return {
        "vocab_size": values["vocab_size"], "hidden_size": hidden, "num_layers": layers, "num_heads": heads,
        "num_kv_heads": heads, "head_size": ratio(hidden, heads), "intermediate_size": 4 * hidden,
        "max_positions": values["seq_length"], "norm": "layernorm", "norm_eps": values["layer_norm_epsilon"],
        "activation": "gelu_tanh", "gated_mlp": False, "position": "alibi", "embedding_norm": True,
        "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
        "tie_word_embeddings": values["tie_word_embeddings"], "embedding_dropout": 0.0,
        "attention_dropout": values["attention_dropout"], "residual_dropout": values["hidden_dropout"],
        "initializer_range": values["initializer_range"], "scale_residual_init": False,
    }


_BLOOM_NAMES = Names(
    prefix="transformer.", embedding="word_embeddings", blocks="h", final_norm="ln_f",
    embedding_norm="word_embeddings_layernorm", qkv_row_order="head_major",
    block={"norm1": "input_layernorm", "attention.qkv": "self_attention.query_key_value",
           "attention.out": "self_attention.dense", "norm2": "post_attention_layernorm",
           "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"})
BLOOM = Family(
    keys={
        "vocab_size": 250880, "hidden_size": None, "n_layer": None, "n_head": None, "n_embed": None,
        "num_attention_heads": None, "num_hidden_layers": None, "seq_length": 2048, "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True,
    },
    fixed={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False, "n_inner": None},
    # settings of the program that trained BLOOM; pretraining_tp matters with slow_but_exact only
    ignored=frozenset({"pretraining_tp", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
                       "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id"}),
    key_names={
        "num_layers": "n_layer", "num_heads": "n_head", "norm_eps": "layer_norm_epsilon",
        "residual_dropout": "hidden_dropout", "max_positions": "seq_length",
    },
    read=_read_bloom, names=_BLOOM_NAMES)
