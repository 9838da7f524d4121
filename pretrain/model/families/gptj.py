"""GPT-J: attention and MLP share one norm, rotary positions on a part of each head, a bias of the head.

transformers rotates pairs of neighbouring elements of a head (models/gptj/modeling_gptj.py, rotate_every_two), and this
project the elements i and i + rotary_size / 2. Therefore the rows of the query and key matrices are reordered.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain.model.families.family import Family, TensorRule, Values, linear, norm, separate_qkv, whole_model
from pretrain.model.families.read import activation, ratio

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig


def _read(values: Values, where: str) -> dict[str, Any]:
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


def _block(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = f"{theirs}.attn"
    yield from norm(f"{ours}.norm1", f"{theirs}.ln_1", config)
    yield from separate_qkv(f"{ours}.attention.qkv", attention, config, row_order="rotary_neighbours")
    yield from linear(f"{ours}.attention.out", f"{attention}.out_proj", hidden, hidden, bias=False)
    yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc_in", inner, hidden, bias=True)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc_out", hidden, inner, bias=True)


def _tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return whole_model(config, embedding="transformer.wte.weight", block=_block, blocks="transformer.h",
                       final_norm="transformer.ln_f")


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
    read=_read, tensors=_tensors, embedding="transformer.wte.weight", prefix="transformer.")
