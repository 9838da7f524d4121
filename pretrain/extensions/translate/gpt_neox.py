"""Settings of GPT-NeoX (megatron/neox_arguments at ea7aefd8)."""

import math
from pathlib import Path

from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import TREE
from pretrain.errors import ConfigError
from pretrain.extensions.translate import parts
from pretrain.extensions.translate.architecture import (
    GPT2_TOKENS,
    Wanted,
    padded,
    padded_vocabulary,
    qk_norm,
    write_model,
)
from pretrain.extensions.translate.deepspeed_json import take_json
from pretrain.extensions.translate.flags import Rates, copy_flags, write_schedule
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import Settings

_OPTIMIZERS = {"adam": "AdamW", "cpu_adam": "AdamW", "cpu_torch_adam": "AdamW", "lion": "Lion"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant"}
_JSON_KEYS = frozenset(TREE)
# megatron/model/activations.py: name -> (name here, whether the MLP has a gate)
_ACTIVATIONS = {"gelu": ("gelu", False), "relu": ("relu", False), "silu": ("silu", False), "swish": ("silu", False),
                "swiglu": ("silu", True), "geglu": ("gelu", True), "reglu": ("relu", True)}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
_POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi"}
_INIT = ("normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform")
# file name of a tokenizer -> its tokens
_VOCABULARIES = {"20B_tokenizer.json": 50277}
GPT2_TOKENIZERS = ("gpt2bpetokenizer", "hfgpt2tokenizer")


def translate_neox(settings: Settings, result: Result, *, vocab_size: int | None) -> None:
    """Translate a configuration of GPT-NeoX. `vocab_size`: tokens of the tokenizer, if the input does not say it."""
    check_attention(settings, result)
    _take_blocks(settings, result)
    write_neox_model(settings, result, vocab_size)
    _optimizer(settings, result)
    _batch_and_length(settings, result)
    _schedule(settings, result)
    _layout(settings, result)
    _data(settings, result)
    _logging(settings, result)
    copy_flags(settings, result)
    if settings.is_on("use_mup"):
        result.none("MATTERS: --mup_base_width is the hidden size of the smaller model that was tuned", "use_mup")
        result.remaining.append("--mup_base_width: the hidden size of the model whose learning rate was tuned")


def _take_blocks(settings: Settings, result: Result) -> None:
    """Take the keys that are keys of DeepSpeed's JSON: GPT-NeoX passes them on."""
    values = {name: value for name, value in settings.given.items() if name in _JSON_KEYS}
    monitors = {name for name in ("wandb", "tensorboard") if not isinstance(values.get(name), (dict, type(None)))}
    precision = settings.text("precision", "")
    blocks = {name: value for name, value in values.items() if name not in monitors and value is not None}
    take_json(result, DsFile(settings.program_name, blocks))
    if precision in ("fp16", "bfloat16", "bf16"):
        block = precision.replace("bfloat16", "bf16")
        result.set_json(f"{block}.enabled", True, "precision")
    elif precision:
        result.used("fp32: neither bf16 nor fp16 is on", "precision")
    _check_optimizer_type(settings)


def _check_optimizer_type(settings: Settings) -> None:
    kind = str(get_value(settings.given, "optimizer.type", "Adam"))
    if kind.lower() not in (*_OPTIMIZERS, "adamw"):
        raise ConfigError(settings.where("optimizer"), found=kind, expected="Adam, AdamW or Lion, which have a "
                          "counterpart here")


def _optimizer(settings: Settings, result: Result) -> None:
    result.json.setdefault("optimizer", {"type": "Adam", "params": {}})
    params = result.json["optimizer"].setdefault("params", {})
    if not settings.has("optimizer"):
        params["lr"] = settings.number("lr", 0.001)
    elif "lr" not in params:
        params["lr"] = 0.001
    if result.json["optimizer"]["type"] != "Lion":
        params.setdefault("eps", 1e-8)
    params.setdefault("betas", [0.95, 0.98] if result.json["optimizer"]["type"] == "Lion" else [0.9, 0.999])
    kind = settings.text("optimizer_type", "")
    if kind and _OPTIMIZERS.get(kind.lower()) is None:
        raise ConfigError(settings.where("optimizer_type"), found=kind, expected=f"one of {', '.join(_OPTIMIZERS)}")
    if kind:
        result.used("the optimizer of the block has this meaning", "optimizer_type")
    if settings.is_on("use_bnb_optimizer"):
        result.json["optimizer"]["type"] = "AdamW8bit"
        result.used('ds_config.json optimizer.type: AdamW8bit', "use_bnb_optimizer")
    parts.write_optimizer(settings, result, "Adam")


def _batch_and_length(settings: Settings, result: Result) -> None:
    if not any(name in result.json for name in ("train_micro_batch_size_per_gpu", "train_batch_size")):
        micro = settings.whole("batch_size", low=1)
        if micro is None:
            raise ConfigError(f"{settings.program_name}: train_micro_batch_size_per_gpu", problem="there is no batch "
                              "size", remedy="give it, or train_batch_size")
        result.set_json("train_micro_batch_size_per_gpu", micro, "batch_size")
    elif settings.has("batch_size"):
        result.none("GPT-NeoX sets it to the micro-batch size itself", "batch_size")
    if "train_batch_size" not in result.json:
        result.json.setdefault("gradient_accumulation_steps", 1)
    if settings.has("train_iters"):
        result.set_run("train_steps", settings.needed("train_iters"), "train_iters")
        if settings.has("train_epochs"):
            result.none("train_iters has the length", "train_epochs")
    else:
        epochs = settings.number("train_epochs")
        result.remaining.append("--train_tokens: the number of tokens of the run, "
                                f"{f'{epochs:g} times those of the training data' if epochs else 'or --train_steps'}")
        if epochs:
            result.used("see what remains to do", "train_epochs")
    result.set_run("seq_length", settings.whole("seq_length", settings.needed("max_position_embeddings"), low=1),
                   *settings.only("seq_length"))


def _schedule(settings: Settings, result: Result) -> None:
    """Write the schedule (megatron/training.py, get_learning_rate_scheduler; megatron/learning_rates.py)."""
    if "scheduler" in result.json:
        result.none("the JSON's scheduler is used", *settings.only(
            "lr_decay_style", "warmup", "lr_decay_iters", "lr_decay_fraction", "min_lr"))
        return
    length = settings.whole("train_iters", low=1)
    end = settings.whole("lr_decay_iters")
    if end is None and settings.has("lr_decay_fraction") and length:
        end = math.floor(length * settings.number("lr_decay_fraction"))
    end = max(end, 1) if end is not None else length
    if end is None:
        result.remaining.append("--lr_warmup_steps: a fraction of "
                                f"{settings.number('warmup'):g} of the steps, once they are known")
    warmup = None if end is None else round(settings.number("warmup") * end)
    rates = Rates(settings.choice("lr_decay_style", _SCHEDULES), warmup, end,
                  lowest=settings.number("min_lr"), peak=result.json["optimizer"]["params"]["lr"], is_clipped=True)
    ends = settings.only("lr_decay_iters", "lr_decay_fraction")
    write_schedule(result, rates, kind=["lr_decay_style"], warmup=["warmup"], end=ends, lowest=["min_lr"],
                   length=length)


def _layout(settings: Settings, result: Result) -> None:
    parts.write_degrees(settings, result, tensor="model_parallel_size", pipeline="pipe_parallel_size")
    if "zero_optimization" not in result.json:
        result.set_json("zero_optimization.stage", settings.whole("zero_stage", 0), "zero_stage")
    for name in settings.only("zero_stage", "zero_reduce_scatter", "zero_contiguous_gradients",
                              "zero_reduce_bucket_size", "zero_allgather_bucket_size"):
        result.none(f"GPT-NeoX sets it from zero_optimization.{name.removeprefix('zero_')} itself", name)
    if settings.has("pipe_partition_method") and "stages" in result.json.get("pipeline", {}):
        method = settings.text("pipe_partition_method").replace("transformer|mlp", "block")
        result.set_json("pipeline.partition_method", method, "pipe_partition_method")
    elif settings.has("pipe_partition_method"):
        result.none("there is one pipeline stage", "pipe_partition_method")
    names = settings.only("checkpoint_activations", "checkpoint_num_layers")
    if settings.is_on("checkpoint_activations"):
        parts.write_recompute(result, settings.whole("checkpoint_num_layers", 1, low=1), *names)
    else:
        result.used("off", *names)
    if settings.is_on("checkpoint_in_cpu"):
        result.set_json("activation_checkpointing.cpu_checkpointing", True, "checkpoint_in_cpu")
    if settings.is_on("fp32_allreduce"):
        result.set_json("communication_data_type", "fp32", "fp32_allreduce")


def _data(settings: Settings, result: Result) -> None:
    weights = settings.words("train_data_weights")
    train = settings.words("train_data_paths") or settings.words("data_path")
    if len(train) > 1 and len(weights) == len(train):
        train = [word for pair in zip(weights, train, strict=True) for word in pair]
    parts.write_train_data(settings, result, train, *settings.only(
        "train_data_paths", "train_data_weights", "data_path"))
    for name in ("valid_data_paths", "test_data_paths"):
        words = settings.words(name)
        parts.write_evaluation_data(result, name.removesuffix("_paths"), list(dict.fromkeys(words)), len(words), name)
    kind, file = settings.text("tokenizer_type").lower(), settings.text("vocab_file")
    is_file = kind in ("hftokenizer", "spmtokenizer", "tiktokentokenizer")
    parts.write_tokenizer(result, file if is_file else "gpt2" if kind in GPT2_TOKENIZERS else "",
                          *settings.only("tokenizer_type", "vocab_file", "merge_file"),
                          why="its tokens are not read here")


def _logging(settings: Settings, result: Result) -> None:
    parts.write_load(settings, result, "load", "save")
    parts.write_tensorboard(settings, result)
    if settings.is_on("use_wandb"):
        keys = {"project": settings.text("wandb_project", "neox"), "group": settings.text("wandb_group"),
                "team": settings.text("wandb_team")}
        parts.write_monitor(result, "wandb", keys, *settings.only(
            "use_wandb", "wandb_project", "wandb_group", "wandb_team"))
    scale = settings.text("checkpoint_scale", "linear")
    if scale == "linear":
        result.set_run("save_interval", settings.whole("checkpoint_factor", 0), "checkpoint_factor")
        result.used("checkpoints at equal intervals", *settings.only("checkpoint_scale"))
    else:
        result.none("checkpoints are saved at equal intervals here: --save_interval",
                    *settings.only("checkpoint_scale", "checkpoint_factor"))
    if settings.is_on("log_gradient_noise_scale"):
        result.set_run("noise_scale_interval", settings.whole("gradient_noise_scale_n_batches", 5, low=1),
                       "log_gradient_noise_scale", "gradient_noise_scale_n_batches")
    parts.write_profile(settings, result, "profile_step_start", "profile_step_stop",
                        "profile", "profile_step_start", "profile_step_stop")


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
