"""Settings of GPT-NeoX (megatron/neox_arguments at ea7aefd8)."""

import math
from pathlib import Path
from typing import Any

from pretrain.commands.translate.architecture import write_model
from pretrain.commands.translate.convert import padded
from pretrain.commands.translate.deepspeed_json import take_json
from pretrain.commands.translate.parts import (
    Rates,
    copy_flags,
    no_data,
    no_tokenizer,
    write_data,
    write_degrees,
    write_load,
    write_monitor,
    write_optimizer,
    write_recompute,
    write_schedule,
    write_tokenizer,
)
from pretrain.commands.translate.result import Result
from pretrain.commands.translate.settings import OFF, Settings
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import TREE
from pretrain.errors import ConfigError

# megatron/model/activations.py: name -> (name here, whether the MLP has a gate)
_ACTIVATIONS = {"gelu": ("gelu", False), "relu": ("relu", False), "silu": ("silu", False), "swish": ("silu", False),
                "swiglu": ("silu", True), "geglu": ("gelu", True), "reglu": ("relu", True)}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
_POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi"}
_INIT = ("normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform")
_OPTIMIZERS = {"adam": "AdamW", "cpu_adam": "AdamW", "cpu_torch_adam": "AdamW", "lion": "Lion"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant"}
# tokenizers that NeoX knows by their kind or file name: tokens, and the value of --tokenizer
_VOCABULARIES = {"20B_tokenizer.json": 50277}
_GPT2_TOKENS = 50257
_JSON_KEYS = frozenset(TREE)


def translate_neox(settings: Settings, result: Result, *, vocab_size: int | None) -> None:
    """Translate a configuration of GPT-NeoX. `vocab_size`: tokens of the tokenizer, if the input does not say it."""
    _take_blocks(settings, result)
    _model(settings, result, vocab_size)
    _optimizer(settings, result)
    _batch_and_length(settings, result)
    _schedule(settings, result)
    _layout(settings, result)
    _data(settings, result)
    _logging(settings, result)
    copy_flags(settings, result)
    _unused(settings, result)


def _unused(settings: Settings, result: Result) -> None:
    """Say why settings have no effect that another setting would turn on."""
    result.unused("of the other kind of norm", *settings.only("layernorm_epsilon", "rms_norm_epsilon"))
    result.unused("there are no rotary positions", *settings.only("rotary_pct", "rotary_emb_base"))
    result.unused("DeepSpeed reads the block fp16", *settings.only(
        "loss_scale", "loss_scale_window", "hysteresis", "min_scale", "dynamic_loss_scale"))
    result.unused("its switch is off", *settings.only(
        "wandb_project", "wandb_group", "wandb_team", "wandb_run_name", "profile_step_start", "profile_step_stop",
        "gradient_noise_scale_n_batches", "mup_width_scale"))
    result.unused("it belongs to generation, or to RWKV", *settings.only("recompute", "head_size"))
    result.unused("DeepSpeed trains here always", *settings.only("deepspeed"))
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


def _model(settings: Settings, result: Result, vocab_size: int | None) -> None:
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
        "residual_dropout": ("hidden_dropout",), "rope_theta": ("rotary_emb_base",), "rotary_size": ("rotary_pct",),
        "windows": ("sliding_window_width",),
        "vocab_size": ("padded_vocab_size", "make_vocab_size_divisible_by"),
    }
    sources = {field: tuple(name for name in names if settings.get(name) is not None)
               for field, names in sources.items()}
    _check_attention(settings, result)
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


def _check_attention(settings: Settings, result: Result) -> None:
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
    write_optimizer(settings, result, "Adam")


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
    write_degrees(settings, result, tensor="model_parallel_size", pipeline="pipe_parallel_size")
    if "zero_optimization" not in result.json:
        result.set_json("zero_optimization.stage", settings.whole("zero_stage", 0), "zero_stage")
    for name, key in (("zero_stage", "stage"), ("zero_reduce_scatter", "reduce_scatter"),
                      ("zero_contiguous_gradients", "contiguous_gradients"),
                      ("zero_reduce_bucket_size", "reduce_bucket_size"),
                      ("zero_allgather_bucket_size", "allgather_bucket_size")):
        if settings.has(name):
            result.none(f"GPT-NeoX sets it from zero_optimization.{key} itself", name)
    if settings.has("pipe_partition_method") and "stages" in result.json.get("pipeline", {}):
        method = settings.text("pipe_partition_method").replace("transformer|mlp", "block")
        result.set_json("pipeline.partition_method", method, "pipe_partition_method")
    elif settings.has("pipe_partition_method"):
        result.none("there is one pipeline stage", "pipe_partition_method")
    names = settings.only("checkpoint_activations", "checkpoint_num_layers")
    if settings.is_on("checkpoint_activations"):
        write_recompute(result, settings.whole("checkpoint_num_layers", 1, low=1), *names)
    else:
        result.used("off", *names)
    if settings.is_on("checkpoint_in_cpu"):
        result.set_json("activation_checkpointing.cpu_checkpointing", True, "checkpoint_in_cpu")
    if settings.is_on("fp32_allreduce"):
        result.set_json("communication_data_type", "fp32", "fp32_allreduce")


def _data(settings: Settings, result: Result) -> None:
    names = ("train_data_paths", "valid_data_paths", "test_data_paths")
    weights = settings.words("train_data_weights")
    train = settings.words("train_data_paths") or settings.words("data_path")
    if len(train) > 1 and len(weights) == len(train):
        train = [word for pair in zip(weights, train, strict=True) for word in pair]
    used = settings.only("train_data_paths", "train_data_weights", "data_path") if train else []
    write_data(settings, result, "train_data", train, *used)
    if not train:
        no_data(result, "the input names no data")
    for name in names[1:]:
        flag = name.removesuffix("_paths")
        write_data(settings, result, flag, list(dict.fromkeys(settings.words(name))), name)
        if len(settings.words(name)) > 1:
            result.differs("several sets are evaluated each by itself, and not as a blend", name)
    if train and used:
        result.differs("the samples are shuffled in another order; `sample_order: neox` is GPT-NeoX's", used[0])
    kind = settings.text("tokenizer_type")
    file = settings.text("vocab_file")
    chosen = settings.only("tokenizer_type", "vocab_file", "merge_file")
    if kind.lower() in ("hftokenizer", "spmtokenizer", "tiktokentokenizer") and file:
        write_tokenizer(settings, result, file, *chosen)
    elif kind.lower() in ("gpt2bpetokenizer", "hfgpt2tokenizer"):
        write_tokenizer(settings, result, "gpt2", *chosen)
    else:
        result.none("its tokens are not read here", *chosen)
        no_tokenizer(result)


def _logging(settings: Settings, result: Result) -> None:
    write_load(settings, result, "load", "save")
    if settings.get("tensorboard_dir") not in OFF:
        write_monitor(result, "tensorboard", {"output_path": settings.text("tensorboard_dir")}, "tensorboard_dir")
    if settings.is_on("use_wandb"):
        keys = {"project": settings.text("wandb_project", "neox"), "group": settings.text("wandb_group"),
                "team": settings.text("wandb_team")}
        write_monitor(result, "wandb", keys, *settings.only("use_wandb", "wandb_project", "wandb_group", "wandb_team"))
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
    if settings.is_on("profile"):
        steps = [settings.whole(name, default) for name, default in (("profile_step_start", 10),
                                                                      ("profile_step_stop", 12))]
        result.set_run("profile_steps", ":".join(map(str, steps)), "profile", "profile_step_start",
                       "profile_step_stop")
