"""GPT-NeoX and Pythia: parallel residual, rotary positions on a part of each head, LayerNorm, biases."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain.model.families.family import Family, TensorRule, Values, fused_qkv, linear, norm, whole_model
from pretrain.model.families.read import activation, ratio
from pretrain.model.families.rope_keys import read_rope

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig


def _read(values: Values, where: str) -> dict[str, Any]:
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


def _block(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from norm(f"{ours}.norm1", f"{theirs}.input_layernorm", config)
    yield from fused_qkv(f"{ours}.attention.qkv", f"{theirs}.attention.query_key_value", config, row_order="head_major")
    yield from linear(f"{ours}.attention.out", f"{theirs}.attention.dense", hidden, hidden,
                      bias=config.attention_out_bias)
    yield from norm(f"{ours}.norm2", f"{theirs}.post_attention_layernorm", config)
    yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h", inner, hidden, bias=True)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h", hidden, inner, bias=True)


def _tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return whole_model(config, embedding="gpt_neox.embed_in.weight", block=_block, blocks="gpt_neox.layers",
                       final_norm="gpt_neox.final_layer_norm")


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
    read=_read, tensors=_tensors, embedding="gpt_neox.embed_in.weight", prefix="gpt_neox.",
    head_in_files="embed_out")
