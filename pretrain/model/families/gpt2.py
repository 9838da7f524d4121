"""GPT-2: learned positions, LayerNorm, biases everywhere."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain.model.families.family import Family, TensorRule, Values, fused_qkv, linear, norm, whole_model
from pretrain.model.families.read import activation, ratio

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig


def _read(values: Values, where: str) -> dict[str, Any]:
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


def _block(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from norm(f"{ours}.norm1", f"{theirs}.ln_1", config)
    yield from fused_qkv(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", config, transposed=True)
    yield from linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", hidden, hidden, bias=True, transposed=True)
    yield from norm(f"{ours}.norm2", f"{theirs}.ln_2", config)
    yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", inner, hidden, bias=True, transposed=True)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", hidden, inner, bias=True, transposed=True)


def _tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return whole_model(config, embedding="transformer.wte.weight", positions="transformer.wpe.weight", block=_block,
                       blocks="transformer.h", final_norm="transformer.ln_f")


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
    read=_read, tensors=_tensors, embedding="transformer.wte.weight", prefix="transformer.")
