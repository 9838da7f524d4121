"""The model that settings of GPT-NeoX describe."""

from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.extensions.translate.architecture import (
    GPT2_TOKENS,
    Wanted,
    padded,
    padded_vocabulary,
    qk_norm,
    write_model,
)
from pretrain.extensions.translate.result import Result
from pretrain.extensions.translate.settings import Settings

# megatron/model/activations.py: name -> (name here, whether the MLP has a gate)
_ACTIVATIONS = {"gelu": ("gelu", False), "relu": ("relu", False), "silu": ("silu", False), "swish": ("silu", False),
                "swiglu": ("silu", True), "geglu": ("gelu", True), "reglu": ("relu", True)}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
_POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi"}
_INIT = ("normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform")
# file name of a tokenizer -> its tokens
_VOCABULARIES = {"20B_tokenizer.json": 50277}
GPT2_TOKENIZERS = ("gpt2bpetokenizer", "hfgpt2tokenizer")


def write_neox_model(settings: Settings, result: Result, vocab_size: int | None) -> None:
    """Write the config.json, and the flags of initial weights. `vocab_size`: tokens of the tokenizer, if known."""
    activation, gated = settings.choice("activation", _ACTIVATIONS)
    norm = settings.choice("norm", _NORMS)
    hidden, heads = settings.needed("hidden_size"), settings.needed("num_attention_heads")
    head_size = hidden // heads
    eps = "rms_norm_epsilon" if norm == "rmsnorm" else "layernorm_epsilon"
    attention_bias, mlp_bias = (_has_bias(settings, name) for name in ("use_bias_in_attn_linear", "use_bias_in_mlp"))
    position = settings.choice("pos_emb", _POSITIONS)
    window, layers = settings.whole("sliding_window_width"), settings.needed("num_layers")
    dropout = settings.number("hidden_dropout")
    wanted: Wanted = {
        "num_layers": (layers, "num_layers"),
        "hidden_size": (hidden, "hidden_size"),
        "num_heads": (heads, "num_attention_heads"),
        "num_kv_heads": (settings.whole("num_kv_heads", heads, low=1), "num_kv_heads"),
        "head_size": (head_size, ""),
        "intermediate_size": (_intermediate_size(settings, gated), "intermediate_size mlp_multiple_of"),
        "vocab_size": (_vocabulary(settings, vocab_size), "padded_vocab_size make_vocab_size_divisible_by"),
        "max_positions": (settings.needed("max_position_embeddings"), "max_position_embeddings"),
        "norm": (norm, "norm"),
        "norm_eps": (settings.number(eps), eps),
        "activation": (activation, "activation"),
        "gated_mlp": (gated, ""),
        "position": (position, "pos_emb"),
        "parallel_residual": (settings.is_on("gpt_j_residual"), "gpt_j_residual"),
        "tie_word_embeddings": (not settings.is_on("no_weight_tying"), "no_weight_tying"),
        "qkv_bias": (attention_bias, "use_bias_in_attn_linear"),
        "attention_out_bias": (attention_bias, ""),
        "mlp_bias": (mlp_bias, "use_bias_in_mlp"),
        "qk_norm": (qk_norm(settings, "use_qk_layernorm", norm, '"norm": "rmsnorm"'), "use_qk_layernorm"),
        "initializer_range": (settings.number("init_method_std"), "init_method_std"),
        "attention_dropout": (settings.number("attention_dropout"), "attention_dropout"),
        "residual_dropout": (dropout, "hidden_dropout"),
        "embedding_dropout": (dropout, "hidden_dropout"),
        "embedding_norm": (False, ""),
        "windows": ((window,) * layers if window else (), "sliding_window_width"),
    }
    if norm == "layernorm":
        wanted["norm_bias"] = _has_bias(settings, "use_bias_in_norms"), "use_bias_in_norms"
    if position == "rope":
        wanted["rope_theta"] = float(settings.number("rotary_emb_base")), "rotary_emb_base"
        wanted["rotary_size"] = int(head_size * settings.number("rotary_pct")), "rotary_pct"
    write_model(settings, result, wanted, lambda name: settings.get(name) is not None)
    if activation == "gelu" and settings.is_on("bias_gelu_fusion"):
        result.differs("the fused operator computes GELU's tanh approximation; config.json has the exact one, as in "
                       'the published conversions. "hidden_act": "gelu_fast" is the approximation', "bias_gelu_fusion")
    for name, flag in (("init_method", "init_method"), ("output_layer_init_method", "output_init_method")):
        result.set_run(flag, settings.choice(name, dict(zip(_INIT, _INIT, strict=True))), name)


def _has_bias(settings: Settings, name: str) -> bool:
    return settings.is_on(name) if settings.has(name) else True


def _intermediate_size(settings: Settings, gated: bool) -> int:
    """Return the inner size of the MLP (megatron/model/transformer.py, ParallelMLP): 2/3 of it with a gate."""
    size, multiple = settings.whole("intermediate_size", low=1), settings.whole("mlp_multiple_of", 1, low=1)
    size = size or 4 * settings.needed("hidden_size")
    if gated:
        return padded(int(size * 2 / 3) // 2, multiple)
    return padded(size, multiple)


def _vocabulary(settings: Settings, vocab_size: int | None) -> int:
    """Return the rows of the embedding: the tokens, padded to a multiple that the tensor-parallel ranks share."""
    multiple = settings.whole("make_vocab_size_divisible_by", low=1) * max(settings.whole("model_parallel_size", 1), 1)
    if settings.has("padded_vocab_size"):
        return settings.needed("padded_vocab_size")
    kind = settings.text("tokenizer_type")
    tokens = vocab_size or _VOCABULARIES.get(Path(settings.text("vocab_file")).name) or (
        GPT2_TOKENS if kind.lower() in GPT2_TOKENIZERS else None)
    return padded_vocabulary(tokens, multiple, f" ({kind})")


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
