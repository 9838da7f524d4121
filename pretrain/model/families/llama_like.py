"""Keys of the config.json, reader and tensor names that Llama and similar families share.

They have RMSNorm, rotary positions, grouped queries and a gated MLP. They differ in biases, in the places of the norms,
in attention windows, and in factors.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain.model.families.family import TensorRule, Values, linear, norm, separate_qkv, whole_model
from pretrain.model.families.read import activation, ratio
from pretrain.model.families.rope_keys import read_rope

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig

BlockRules = Callable[[str, str, "ModelConfig"], Iterator[TensorRule]]
KEYS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None, "attention_dropout": 0.0,
}
KEY_NAMES = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "activation": "hidden_act", "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}


def read_llama_like(values: Values, where: str, **differences: Any) -> dict[str, Any]:
    """Return the fields of ModelConfig.

    Args:
        differences: fields that differ from those of a Llama without biases.
    """
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_size = ratio(values["hidden_size"], heads) if values["head_dim"] is None else values["head_dim"]
    fields = {
        "vocab_size": values["vocab_size"], "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"], "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads, "head_size": head_size,
        "intermediate_size": values["intermediate_size"], "max_positions": values["max_position_embeddings"],
        "norm": "rmsnorm", "norm_eps": values["rms_norm_eps"], "gated_mlp": True, "position": "rope",
        "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False,
        "tie_word_embeddings": values["tie_word_embeddings"], "embedding_dropout": 0.0,
        "attention_dropout": values["attention_dropout"] or 0.0, "residual_dropout": 0.0,
        "initializer_range": values["initializer_range"], "scale_residual_init": False, **differences,
    }
    if "activation" not in fields:
        fields["activation"] = activation(values["hidden_act"], f"{where}: hidden_act")
    if "rope_theta" not in fields:
        fields |= read_rope(values, where, theta_key="rope_theta", fraction_key=None, head_size=head_size)
    return fields


def mlp_tensors(ours: str, theirs: str, config: "ModelConfig", inner: int) -> Iterator[TensorRule]:
    """Yield the rules of a gated MLP with the inner size `inner`."""
    hidden = config.hidden_size
    for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield from linear(f"{ours}.{part}", f"{theirs}.{part}_proj", rows, columns, bias=config.mlp_bias)


def _dense_mlp(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    return mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", config, config.intermediate_size)


def _block(ours: str, theirs: str, config: "ModelConfig", *, mlp: BlockRules) -> Iterator[TensorRule]:
    hidden, size = config.hidden_size, config.head_size
    attention = f"{theirs}.self_attn"
    if config.pre_norm:
        yield from norm(f"{ours}.norm1", f"{theirs}.input_layernorm", config)
    yield from separate_qkv(f"{ours}.attention.qkv", attention, config)
    if config.qk_norm:
        for part, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            yield from norm(f"{ours}.attention.{part}", f"{attention}.{part}", config, config.qk_norm_size(heads))
    yield from linear(f"{ours}.attention.out", f"{attention}.o_proj", hidden, config.num_heads * size,
                      bias=config.attention_out_bias)
    if config.post_norm:
        yield from norm(f"{ours}.post_norm1", f"{theirs}.post_attention_layernorm", config)
    if config.pre_norm and not config.shared_norm:
        # in a model without post-norms, "post_attention" means: before the MLP
        name = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
        yield from norm(f"{ours}.norm2", f"{theirs}.{name}", config)
    yield from mlp(ours, theirs, config)
    if config.post_norm:
        yield from norm(f"{ours}.post_norm2", f"{theirs}.post_feedforward_layernorm", config)


def llama_like_tensors(config: "ModelConfig", mlp: BlockRules = _dense_mlp) -> Iterator[TensorRule]:
    """Yield the rules of all tensors. `mlp` yields those of a block's MLP for (our block, their block, config)."""
    return whole_model(config, embedding="model.embed_tokens.weight", block=partial(_block, mlp=mlp),
                       blocks="model.layers", final_norm="model.norm")
