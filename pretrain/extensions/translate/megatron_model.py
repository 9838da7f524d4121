"""The model that arguments of Megatron-LM and of its forks describe."""

from typing import Any

from pretrain.errors import ConfigError
from pretrain.extensions.translate.architecture import GPT2_TOKENS, Wanted, padded_vocabulary, qk_norm, write_model
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import OFF, Settings

_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rope", "rotary": "rope",
              "alibi": "alibi"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}  # --glu-activation of BigScience's fork
# settings that the table lists with their defaults
_LISTED_DEFAULTS = ("init_method_std", "hidden_dropout", "attention_dropout")


def write_megatron_model(settings: Settings, result: Result, vocab_size: int | None) -> None:
    """Write the config.json, and the flags of initial weights. `vocab_size`: tokens of the tokenizer, if known."""
    layers = settings.whole("num_layers", settings.whole("decoder_num_layers"), low=1) or settings.needed("num_layers")
    hidden, heads = settings.needed("hidden_size"), settings.needed("num_attention_heads")
    head_size = settings.whole("kv_channels", hidden // heads, low=1)
    activation, gated = _activation(settings)
    norm = settings.choice("normalization", _NORMS)
    rope = settings.is_on("use_rotary_position_embeddings")
    position = "rope" if rope else settings.choice("position_embedding_type", _POSITIONS)
    if settings.is_on("no_position_embedding") and position != "rope":
        raise ConfigError(settings.where("no_position_embedding"), problem="no family here has no positions at all",
                          remedy="--position-embedding-type rope has a counterpart")
    bias = not settings.is_on("disable_bias_linear") and (
        settings.is_on("add_bias_linear") if settings.has("add_bias_linear") else True)
    dropout = settings.number("hidden_dropout")
    window = _window(settings)
    kv_heads = settings.whole("num_kv_heads", low=1) or (
        settings.whole("num_query_groups", 1, low=1) if settings.is_on("group_query_attention") else heads)
    positions = settings.whole("max_position_embeddings", low=1) or settings.needed("seq_length")
    wanted: Wanted = {
        "num_layers": (layers, "num_layers decoder_num_layers"),
        "hidden_size": (hidden, "hidden_size"),
        "num_heads": (heads, "num_attention_heads"),
        "num_kv_heads": (kv_heads, "group_query_attention num_query_groups num_kv_heads"),
        "head_size": (head_size, "kv_channels"),
        "intermediate_size": (_intermediate_size(settings, gated), "ffn_hidden_size"),
        "vocab_size": (_vocabulary(settings, vocab_size),
                       "vocab_size padded_vocab_size pad_vocab_size_to make_vocab_size_divisible_by"),
        "max_positions": (positions, "max_position_embeddings"),
        "norm": (norm, "normalization"),
        "norm_eps": (settings.number("layernorm_epsilon"), "layernorm_epsilon"),
        "activation": (activation, "swiglu openai_gelu squared_relu gated_linear_unit glu_activation"),
        "gated_mlp": (gated, ""),
        "position": (position, "use_rotary_position_embeddings position_embedding_type no_position_embedding"),
        "parallel_residual": (False, ""),
        "tie_word_embeddings": (not settings.is_on("untie_embeddings_and_output_weights"),
                                "untie_embeddings_and_output_weights"),
        "qkv_bias": (bias or settings.is_on("add_qkv_bias"), "add_qkv_bias"),
        "attention_out_bias": (bias, ""),
        "mlp_bias": (bias, "disable_bias_linear add_bias_linear"),
        "qk_norm": (qk_norm(settings, "qk_layernorm", norm, "--normalization RMSNorm"), "qk_layernorm"),
        "embedding_norm": (settings.is_on("embed_layernorm"), "embed_layernorm"),
        "initializer_range": (settings.number("init_method_std"), "init_method_std"),
        "windows": ((window,) * layers if window else (), "window_size"),
        "attention_dropout": (settings.number("attention_dropout"), "attention_dropout"),
        "residual_dropout": (dropout, "hidden_dropout"),
        "embedding_dropout": (dropout, "hidden_dropout"),
    }
    if norm == "layernorm":
        wanted["norm_bias"] = True, ""
    if position == "rope":
        wanted["rope_theta"] = float(settings.number("rotary_base")), "rotary_base"
        wanted["rope_scaling"] = _rope_scaling(settings), "use_rope_scaling rope_scaling_factor"
        wanted["rotary_size"] = int(head_size * settings.number("rotary_percent")), "rotary_percent"
    wanted |= experts_of(settings)
    _refuse(settings)
    write_model(settings, result, wanted, lambda name: settings.has(name) or (
        name in _LISTED_DEFAULTS and settings.get(name) is not None))
    if settings.is_on("layernorm_zero_centered_gamma"):
        result.differs("the weights of norms are stored with 1 added; without weight decay, training is the same",
                       "layernorm_zero_centered_gamma")
    if settings.is_on("init_method_xavier_uniform"):
        result.set_run("init_method", "xavier_uniform", "init_method_xavier_uniform")
        result.set_run("output_init_method", "xavier_uniform", "init_method_xavier_uniform")
    else:  # core/transformer/transformer_config.py: init_method_normal, scaled_init_method_normal
        result.set_run("init_method", "normal", "init_method")
        result.set_run("output_init_method", "scaled_normal", "output_layer_init_method")


def _refuse(settings: Settings) -> None:
    if settings.has("softmax_scale"):
        raise ConfigError(settings.where("softmax_scale"), problem="scores are always divided by the square root of "
                          "the head size here")
    for name in ("quick_geglu", "rotary_interleaved"):
        if settings.is_on(name):
            raise ConfigError(settings.where(name), problem="no family of models here computes it")


def _activation(settings: Settings) -> tuple[str, bool]:
    """Return the activation, and whether the MLP has a gate.

    Fused with the bias (core/fusions/fused_bias_gelu.py), GELU is the tanh approximation.
    """
    if settings.is_on("swiglu"):
        return "silu", True
    if settings.get("glu_activation") not in OFF:
        return settings.choice("glu_activation", _GATES), True
    gated = settings.is_on("gated_linear_unit")
    if settings.is_on("squared_relu"):
        return "relu2", gated
    is_fused = not settings.is_on("no_bias_gelu_fusion") and not settings.is_on("disable_bias_linear")
    return "gelu_tanh" if settings.is_on("openai_gelu") or is_fused else "gelu", gated


def _intermediate_size(settings: Settings, gated: bool) -> int:
    """Return the inner size of the MLP: 4 h, and with SwiGLU 8/3 h as a multiple of 64 (arguments.py)."""
    size: int | None = settings.whole("ffn_hidden_size", low=1)
    hidden = settings.needed("hidden_size")
    if size is not None:
        return size
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated and settings.is_on("swiglu") else 4 * hidden


def _window(settings: Settings) -> int:
    """Return the attention window in tokens with the own one; Megatron's (LEFT, RIGHT) is without it. 0: none."""
    words = "".join(settings.words("window_size")).strip("()[]").split(",")
    if words == [""]:
        return 0
    if not words[0].lstrip("-").isdigit():
        raise settings.wrong("window_size", "two numbers such as (4095,0)")
    return int(words[0]) + 1 if int(words[0]) >= 0 else 0


def _rope_scaling(settings: Settings) -> dict[str, Any] | None:
    """Return the scaling of Llama 3 (core/models/common/embeddings/rotary_pos_embedding.py)."""
    if not settings.is_on("use_rope_scaling"):
        return None
    return {"rope_type": "llama3", "factor": float(settings.number("rope_scaling_factor", 8.0)),
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def experts_of(settings: Settings) -> Wanted:
    """Return the fields of a mixture of experts; {} for a model without."""
    name = "num_experts" if settings.has("num_experts") else "num_moe_experts"
    count = settings.whole(name) if settings.has(name) else 0
    if not count or count == 1:
        return {}
    if settings.get("moe_layer_freq") not in (None, 1, "1") or settings.get("expert_interval") not in (None, 1, "1"):
        raise ConfigError(settings.where("moe_layer_freq"), problem="here all layers of such a model have experts")
    size = settings.whole("moe_ffn_hidden_size", low=1) or _intermediate_size(settings, settings.is_on("swiglu"))
    shared = "moe_shared_expert_intermediate_size"
    return {
        "num_experts": (count, "num_experts num_moe_experts"),
        "experts_per_token": (settings.whole("moe_router_topk", low=1), "moe_router_topk"),
        "moe_intermediate_size": (size, "moe_ffn_hidden_size"),
        "norm_topk_prob": (True, ""),
        "intermediate_size": (size, "ffn_hidden_size"),
        "shared_expert_size": (settings.whole(shared, 0), shared),
    }


def _vocabulary(settings: Settings, vocab_size: int | None) -> int:
    """Return the rows of the embedding, padded for the tensor-parallel ranks."""
    for name in ("padded_vocab_size", "pad_vocab_size_to"):
        if settings.has(name):
            return settings.needed(name)
    degree = settings.whole("tensor_model_parallel_size", settings.whole("model_parallel_size", 1), low=1)
    multiple = settings.whole("make_vocab_size_divisible_by", low=1) * degree
    tokens = settings.whole("vocab_size", low=1) or vocab_size
    if tokens is None and settings.text("tokenizer_type") in ("GPT2BPETokenizer", ""):
        tokens = GPT2_TOKENS if settings.has("tokenizer_type") or settings.has("merge_file") else None
    return padded_vocabulary(tokens, multiple)
