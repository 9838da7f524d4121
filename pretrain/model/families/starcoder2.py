"""StarCoder2: grouped queries, attention windows, LayerNorm, biases, an MLP without gate."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain.model.families.family import Family, TensorRule, Values, linear, norm, separate_qkv, whole_model
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, read_llama_like
from pretrain.model.families.windows import read_windows

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig


def _read(values: Values, where: str) -> dict[str, Any]:
    bias = values["use_bias"]
    return read_llama_like({**values, "head_dim": None, "rms_norm_eps": values["norm_epsilon"]}, where,
                           norm="layernorm", gated_mlp=False, qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias,
                           embedding_dropout=values["embedding_dropout"], residual_dropout=values["residual_dropout"],
                           windows=read_windows(values, where))


def _block(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    attention = f"{theirs}.self_attn"
    yield from norm(f"{ours}.norm1", f"{theirs}.input_layernorm", config)
    yield from separate_qkv(f"{ours}.attention.qkv", attention, config)
    yield from linear(f"{ours}.attention.out", f"{attention}.o_proj", hidden, hidden, bias=bias)
    yield from norm(f"{ours}.norm2", f"{theirs}.post_attention_layernorm", config)
    yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", inner, hidden, bias=bias)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", hidden, inner, bias=bias)


def _tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return whole_model(config, embedding="model.embed_tokens.weight", block=_block, blocks="model.layers",
                       final_norm="model.norm")


STARCODER2 = Family(
    keys={
        **{key: default for key, default in KEYS.items() if key not in ("head_dim", "rms_norm_eps")},
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "initializer_range": 0.018042, "norm_epsilon": 1e-5, "sliding_window": None,
        "residual_dropout": 0.0, "embedding_dropout": 0.0, "use_bias": True, "tie_word_embeddings": True,
    },
    fixed={"mlp_type": "default", "norm_type": "layer_norm"},  # in published files; transformers has no others
    # activation_function and layer_norm_epsilon: in published files next to hidden_act and norm_epsilon, which
    # transformers uses instead
    ignored=frozenset({"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "activation_function",
                       "layer_norm_epsilon"}),
    key_names={**KEY_NAMES, "norm_eps": "norm_epsilon"},
    read=_read, tensors=_tensors, embedding="model.embed_tokens.weight", prefix="model.")
