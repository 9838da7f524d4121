"""The model that settings of GPT-NeoX describe."""

from pathlib import Path
from typing import Any

from pretrain.commands.translate.architecture import write_model
from pretrain.commands.translate.convert import padded
from pretrain.commands.translate.result import Result
from pretrain.commands.translate.settings import Settings
from pretrain.errors import ConfigError

# megatron/model/activations.py: name -> (name here, whether the MLP has a gate)
_ACTIVATIONS = {"gelu": ("gelu", False), "relu": ("relu", False), "silu": ("silu", False), "swish": ("silu", False),
                "swiglu": ("silu", True), "geglu": ("gelu", True), "reglu": ("relu", True)}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
_POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi"}
_INIT = ("normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform")
# file name of a tokenizer -> its tokens
_VOCABULARIES = {"20B_tokenizer.json": 50277}
_GPT2_TOKENS = 50257


def write_neox_model(settings: Settings, result: Result, vocab_size: int | None) -> None:
    """Write the config.json, and the flags of initial weights. `vocab_size`: tokens of the tokenizer, if known."""
    activation, gated = settings.choice("activation", _ACTIVATIONS)
    norm = settings.choice("norm", _NORMS)
    hidden, heads = settings.needed("hidden_size"), settings.needed("num_attention_heads")
    head_size = hidden // heads
    attention_bias, mlp_bias = (settings.is_on(name) if settings.has(name) else True
                                for name in ("use_bias_in_attn_linear", "use_bias_in_mlp"))
    position = settings.choice("pos_emb", _POSITIONS)
    eps = "rms_norm_epsilon" if norm == "rmsnorm" else "layernorm_epsilon"
    parallel = settings.is_on("gpt_j_residual")
    window = settings.whole("sliding_window_width")
    dropout = settings.number("hidden_dropout")
    wanted: dict[str, Any] = {
        "num_layers": settings.needed("num_layers"), "hidden_size": hidden, "num_heads": heads,
        "num_kv_heads": settings.whole("num_kv_heads", heads, low=1), "head_size": head_size,
        "intermediate_size": _intermediate_size(settings, gated),
        "vocab_size": _vocabulary(settings, result, vocab_size),
        "max_positions": settings.needed("max_position_embeddings"), "norm": norm, "norm_eps": settings.number(eps),
        "activation": activation, "gated_mlp": gated, "position": position, "parallel_residual": parallel,
        "tie_word_embeddings": not settings.is_on("no_weight_tying"), "qkv_bias": attention_bias,
        "attention_out_bias": attention_bias, "mlp_bias": mlp_bias,
        "qk_norm": _qk_norm(settings, norm), "initializer_range": settings.number("init_method_std"),
        "attention_dropout": settings.number("attention_dropout"), "residual_dropout": dropout,
        "embedding_dropout": dropout, "embedding_norm": False,
        "windows": (window,) * settings.needed("num_layers") if window else (),
    }
    if norm == "layernorm":
        wanted["norm_bias"] = settings.is_on("use_bias_in_norms") if settings.has("use_bias_in_norms") else True
    if position == "rope":
        wanted |= {"rope_theta": float(settings.number("rotary_emb_base")),
                   "rotary_size": int(head_size * settings.number("rotary_pct"))}
    sources = {
        "num_layers": ("num_layers",), "hidden_size": ("hidden_size",), "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_kv_heads",), "intermediate_size": ("intermediate_size", "mlp_multiple_of"),
        "max_positions": ("max_position_embeddings",), "norm": ("norm",), "norm_eps": (eps,),
        "norm_bias": ("use_bias_in_norms",), "activation": ("activation",), "position": ("pos_emb",),
        "parallel_residual": ("gpt_j_residual",), "tie_word_embeddings": ("no_weight_tying",),
        "qkv_bias": ("use_bias_in_attn_linear",), "mlp_bias": ("use_bias_in_mlp",), "qk_norm": ("use_qk_layernorm",),
        "initializer_range": ("init_method_std",), "attention_dropout": ("attention_dropout",),
        "residual_dropout": ("hidden_dropout",), "embedding_dropout": ("hidden_dropout",),
        "rope_theta": ("rotary_emb_base",), "rotary_size": ("rotary_pct",),
        "windows": ("sliding_window_width",),
        "vocab_size": ("padded_vocab_size", "make_vocab_size_divisible_by"),
    }
    sources = {field: tuple(name for name in names if settings.get(name) is not None)
               for field, names in sources.items()}
    write_model(settings, result, wanted, sources)
    if activation == "gelu" and settings.is_on("bias_gelu_fusion"):
        result.differs("the fused operator computes GELU's tanh approximation; config.json has the exact one, as in "
                       'the published conversions. "hidden_act": "gelu_fast" is the approximation', "bias_gelu_fusion")
    for name, flag in (("init_method", "init_method"), ("output_layer_init_method", "output_init_method")):
        result.set_run(flag, settings.choice(name, dict(zip(_INIT, _INIT, strict=True))), name)


def _intermediate_size(settings: Settings, gated: bool) -> int:
    """Return the inner size of the MLP (megatron/model/transformer.py, ParallelMLP): 2/3 of it with a gate."""
    size, multiple = settings.whole("intermediate_size", low=1), settings.whole("mlp_multiple_of", 1, low=1)
    size = size or 4 * settings.needed("hidden_size")
    if gated:
        return padded(int(size * 2 / 3) // 2, multiple)
    return padded(size, multiple)


def _qk_norm(settings: Settings, norm: str) -> str:
    if not settings.is_on("use_qk_layernorm"):
        return ""
    if norm != "rmsnorm":
        raise ConfigError(settings.where("use_qk_layernorm"), problem="no family here has a LayerNorm of queries and "
                          "keys", remedy='"norm": "rmsnorm" has a counterpart')
    return "head"


def _vocabulary(settings: Settings, result: Result, vocab_size: int | None) -> int:
    """Return the rows of the embedding: the tokens, padded to a multiple that the tensor-parallel ranks share."""
    multiple = settings.whole("make_vocab_size_divisible_by", low=1) * max(settings.whole("model_parallel_size", 1), 1)
    if settings.has("padded_vocab_size"):
        return settings.needed("padded_vocab_size")
    file = Path(settings.text("vocab_file")).name
    tokens = vocab_size or _VOCABULARIES.get(file)
    kind = settings.text("tokenizer_type")
    if tokens is None and kind.lower() in ("gpt2bpetokenizer", "hfgpt2tokenizer"):
        tokens = _GPT2_TOKENS
    if tokens is None:
        raise ConfigError("--vocab_size", problem=f"the input does not say how many tokens the tokenizer has ({kind})",
                          remedy="give their number, before padding")
    return padded(tokens, multiple)


def check_attention(settings: Settings, result: Result) -> None:
    """Accept dense attention of every kernel. Raises ConfigError for other kinds."""
    value = settings.get("attention_config")
    if value is None:
        return
    kinds = {str(kind) for entry in value for kind in (entry[0] if isinstance(entry, list) else [entry])} \
        if isinstance(value, list) and all(value) else {str(value)}
    if not kinds <= {"global", "flash"}:
        raise ConfigError(settings.where("attention_config"), found=", ".join(sorted(kinds)),
                          expected="global or flash attention in all layers")
    result.used("attention to all earlier tokens; the kernel is chosen here", "attention_config")
