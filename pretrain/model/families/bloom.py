"""BLOOM: ALiBi instead of positions, a norm after the embedding, LayerNorm, biases."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError
from pretrain.model.families.family import Family, TensorRule, Values, fused_qkv, linear, norm, whole_model
from pretrain.model.families.read import ratio

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig

# older name -> name; published files have the older ones
_OLDER_NAMES = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
_DEFAULTS = {"hidden_size": 64, "n_head": 8, "n_layer": 2}


def _size(values: Values, key: str, where: str) -> int:
    """Return the value of a key that has an older name."""
    older = next(name for name, now in _OLDER_NAMES.items() if now == key)
    given = [name for name in (key, older) if values[name] is not None]
    if len(given) == 2 and values[key] != values[older]:
        raise ConfigError(f"{where}: {older}", found=values[older], expected=f"{values[key]}, as {key}",
                          remedy="They are two names of one value")
    return int(values[given[0]]) if given else _DEFAULTS[key]


def _read(values: Values, where: str) -> dict[str, Any]:
    hidden, heads, layers = (_size(values, key, where) for key in ("hidden_size", "n_head", "n_layer"))
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


def _block(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = f"{theirs}.self_attention"
    yield from norm(f"{ours}.norm1", f"{theirs}.input_layernorm", config)
    yield from fused_qkv(f"{ours}.attention.qkv", f"{attention}.query_key_value", config, row_order="head_major")
    yield from linear(f"{ours}.attention.out", f"{attention}.dense", hidden, hidden, bias=True)
    yield from norm(f"{ours}.norm2", f"{theirs}.post_attention_layernorm", config)
    yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h", inner, hidden, bias=True)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h", hidden, inner, bias=True)


def _tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return whole_model(config, embedding="transformer.word_embeddings.weight", block=_block, blocks="transformer.h",
                       embedding_norm="transformer.word_embeddings_layernorm", final_norm="transformer.ln_f")


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
    read=_read, tensors=_tensors, embedding="transformer.word_embeddings.weight", prefix="transformer.")
