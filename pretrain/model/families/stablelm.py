"""StableLM: Llama with LayerNorm, rotary positions on a part of each head, and optionally a parallel residual."""

from typing import Any

from pretrain.model.families.family import Family, Values
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, llama_like_tensors, read_llama_like
from pretrain.model.families.read import ratio
from pretrain.model.families.rope_keys import read_rope


def _read(values: Values, where: str) -> dict[str, Any]:
    head_size = ratio(values["hidden_size"], values["num_attention_heads"])
    rope = read_rope(values, where, theta_key="rope_theta", fraction_key="partial_rotary_factor", head_size=head_size,
                     default_fraction=0.25)
    parallel = values["use_parallel_residual"]
    return read_llama_like({**values, "head_dim": None, "rms_norm_eps": values["layer_norm_eps"]}, where, **rope,
                           norm="layernorm", parallel_residual=parallel, shared_norm=parallel,
                           qkv_bias=values["use_qkv_bias"])


STABLELM = Family(
    keys={
        **{key: default for key, default in KEYS.items() if key not in ("head_dim", "rms_norm_eps")},
        "vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "use_qkv_bias": False,
        "use_parallel_residual": False, "partial_rotary_factor": None,
    },
    # transformers applies hidden_dropout to the output of the MLP only
    fixed={"qk_layernorm": False, "hidden_dropout": 0.0},
    key_names={**KEY_NAMES, "norm_eps": "layer_norm_eps", "rotary_size": "partial_rotary_factor",
               "parallel_residual": "use_parallel_residual"},
    read=_read, tensors=llama_like_tensors, embedding="model.embed_tokens.weight", prefix="model.")
