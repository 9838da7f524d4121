"""Phi 1, 1.5 and 2: attention and MLP share one norm, rotary positions on a part of each head, biases everywhere."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain.model.families.family import Family, TensorRule, Values, linear, norm, separate_qkv, whole_model
from pretrain.model.families.read import activation, ratio
from pretrain.model.families.rope_keys import read_rope

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig


def _read(values: Values, where: str) -> dict[str, Any]:
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


def _block(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = f"{theirs}.self_attn"
    yield from norm(f"{ours}.norm1", f"{theirs}.input_layernorm", config)
    yield from separate_qkv(f"{ours}.attention.qkv", attention, config)
    yield from linear(f"{ours}.attention.out", f"{attention}.dense", hidden, hidden, bias=True)
    yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc1", inner, hidden, bias=True)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc2", hidden, inner, bias=True)


def _tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return whole_model(config, embedding="model.embed_tokens.weight", block=_block, blocks="model.layers",
                       final_norm="model.final_layernorm")


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
    read=_read, tensors=_tensors, embedding="model.embed_tokens.weight", prefix="model.")
