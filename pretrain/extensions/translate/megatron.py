"""Arguments of Megatron-LM (megatron/training/arguments.py at d98e8a64dd) and of its forks with DeepSpeed."""

import dataclasses
import math
from typing import Any

from pretrain.errors import ConfigError
from pretrain.extensions.translate import parts
from pretrain.extensions.translate.deepspeed_json import take_json_file
from pretrain.extensions.translate.flags import Rates, batch_stages, copy_flags, write_schedule
from pretrain.extensions.translate.megatron_model import experts_of, write_megatron_model
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import OFF, Settings

_OPTIMIZERS = {"adam": "AdamW", "lion": "Lion", "muon": "Muon", "sgd": "SGD"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "WSD": "wsd",
              "inverse-square-root": "inverse_sqrt"}
_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
_SHARDING = {"no_shard": 1, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def translate_megatron(settings: Settings, result: Result, *, vocab_size: int | None) -> None:
    """Translate arguments of Megatron-LM. `vocab_size`: tokens of the tokenizer, if the input does not say it."""
    with_json = _take_json(settings, result)
    write_megatron_model(settings, result, vocab_size)
    _optimizer(settings, result)
    seq_length = settings.whole("seq_length", settings.whole("decoder_seq_length"), low=1) or settings.needed(
        "seq_length")
    result.set_run("seq_length", seq_length, *settings.only("seq_length", "decoder_seq_length"))
    _batch(settings, result, seq_length)
    _length_and_schedule(settings, result, seq_length)
    _layout(settings, result, with_json)
    _precision(settings, result)
    _data(settings, result)
    _logging(settings, result)
    of_experts = ("router_aux_loss", "router_z_loss", "expert_capacity_factor")
    copy_flags(settings, result, without=() if experts_of(settings) else of_experts)


def _take_json(settings: Settings, result: Result) -> bool:
    """Take the JSON of --deepspeed_config. Returns whether there is one."""
    name = settings.first("deepspeed_config", "deepscale_config")
    if settings.has("deepspeed"):
        result.used("DeepSpeed trains here always", "deepspeed")
    if not name:
        return False
    return take_json_file(settings, result, name, flag="--deepspeed_config")


def _optimizer(settings: Settings, result: Result) -> None:
    kind = settings.choice("optimizer", _OPTIMIZERS)
    params = {"Lion": (("betas", ("lion_beta1", "lion_beta2"), [0.95, 0.98]),),
              "SGD": (("momentum", ("sgd_momentum",), [0.9]),),
              "Muon": (("momentum", ("muon_momentum",), [0.9]),)}.get(kind, ())
    parts.write_optimizer(settings, result, kind, "optimizer")
    for key, names, defaults in params:
        values = [settings.number(name, default) for name, default in zip(names, defaults, strict=True)]
        result.set_json(f"optimizer.params.{key}", values if len(values) > 1 else values[0], *names)
    if settings.has("decoupled_weight_decay") and not settings.is_on("decoupled_weight_decay"):
        result.set_json("optimizer.params.adam_w_mode", False, "decoupled_weight_decay")
    elif settings.has("decoupled_weight_decay"):
        result.used("as AdamW does", "decoupled_weight_decay")
    if "lr" not in result.json["optimizer"].get("params", {}):
        raise ConfigError(f"{settings.program_name}: lr", problem="there is no learning rate", remedy="give --lr")


def _batch(settings: Settings, result: Result, seq_length: int) -> None:
    micro = settings.whole("micro_batch_size", settings.whole("batch_size"), low=1)
    total = settings.whole("global_batch_size", low=1)
    if micro is None and "train_micro_batch_size_per_gpu" not in result.json:
        raise ConfigError(f"{settings.program_name}: micro_batch_size", problem="it is missing",
                          remedy="give --micro-batch-size")
    for dotted, value, names in (("train_micro_batch_size_per_gpu", micro, ("micro_batch_size", "batch_size")),
                                 ("train_batch_size", total, ("global_batch_size",))):
        found = result.json.get(dotted)
        if value is not None and found in (None, "auto", value):
            result.set_json(dotted, value, *settings.only(*names))
        elif value is not None:
            raise ConfigError(settings.where(names[0]), found=value, expected=f"{found}, {dotted} of the JSON")
    result.json.pop("gradient_accumulation_steps", None) if "train_batch_size" in result.json else \
        result.json.setdefault("gradient_accumulation_steps", 1)
    ramp = settings.words("rampup_batch_size")
    if not ramp:
        return
    numbers = [int(word) for word in ramp if word.lstrip("-").replace("_", "").isdigit()]
    if len(numbers) != 3 or total is None or numbers[1] < 1 or not 0 < numbers[0] <= total or numbers[2] < 1:
        raise settings.wrong("rampup_batch_size", "START INCREMENT SAMPLES, with a larger --global-batch-size")
    if numbers[0] < total:
        result.set_run("batch_schedule", batch_stages(numbers, final=total, seq_length=seq_length), "rampup_batch_size")
        result.differs("rates follow the optimizer steps between the ends of warm-up and decay, and there the samples: "
                       "they fall faster while the batch is smaller", "rampup_batch_size")
    else:
        result.used("the global batch from the beginning", "rampup_batch_size")


def _length_and_schedule(settings: Settings, result: Result, seq_length: int) -> None:
    """Write the length, and the schedule: in tokens if the run's length is given in samples or tokens."""
    samples = settings.whole("train_samples", low=1)
    tokens = settings.whole("train_tokens", low=1)
    unit = "tokens" if tokens or samples else "steps"
    length = tokens or (samples * seq_length if samples else settings.whole("train_iters", low=1))
    if length is None:
        result.remaining.append("--train_steps: the input has no --train-iters and no --train-samples")
    else:
        result.set_run(f"train_{unit}", length, *settings.only("train_tokens", "train_samples", "train_iters"))
    if "scheduler" in result.json:
        return
    end = _in_unit(settings, "lr_decay", unit, seq_length)
    warmup = _in_unit(settings, "lr_warmup", unit, seq_length) or 0
    if settings.has("lr_warmup_fraction"):
        warmup = math.floor(settings.number("lr_warmup_fraction") * (end or length)) if end or length else None
    kind = settings.choice("lr_decay_style", _SCHEDULES)
    rates = Rates(kind, warmup, end, lowest=settings.number("min_lr"), peak=result.json["optimizer"]["params"]["lr"],
                  unit=unit)
    if kind == "wsd":
        rates = dataclasses.replace(rates, wsd=_in_unit(settings, "lr_wsd_decay", unit, seq_length),
                                    shape=settings.choice("lr_wsd_decay_style", _SHAPES, "exponential"))
    write_schedule(result, rates, kind=["lr_decay_style"], lowest=["min_lr"], length=length,
                   wsd=settings.only("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
                   end=settings.only("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"),
                   warmup=settings.only("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens",
                                 "lr_warmup_fraction") or ["lr_warmup_iters"])


def _in_unit(settings: Settings, name: str, unit: str, seq_length: int) -> Any:
    """Return a length in steps or tokens, from NAME_iters, NAME_samples or NAME_tokens; None: not given."""
    if unit == "steps":
        return settings.whole(f"{name}_iters")
    samples = settings.whole(f"{name}_samples")
    return settings.whole(f"{name}_tokens") or (None if samples is None else samples * seq_length)


def _layout(settings: Settings, result: Result, with_json: bool) -> None:
    pipeline = settings.first("pipeline_model_parallel_size")
    tensor = settings.first("tensor_model_parallel_size", "model_parallel_size")
    parts.write_degrees(settings, result, pipeline=pipeline, tensor=tensor,
                        sequence=settings.first("context_parallel_size", "ds_sequence_parallel_size"))
    _expert_degree(settings, result, settings.whole(tensor, 1, low=1) if tensor else 1)
    stages = settings.whole(pipeline, 1) if pipeline else 1
    names = settings.only("zero_stage", "use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp",
                   "use_custom_fsdp", "data_parallel_sharding_strategy")
    if not (with_json and "zero_optimization" in result.json):
        result.set_json("zero_optimization.stage", _zero_stage(settings, stages, with_json), *names)
    else:
        stage = result.json["zero_optimization"].get("stage", 0)
        result.used(f"the JSON has ZeRO stage {stage}, which is used", *names)
    if not names and not with_json:
        result.set_json("zero_optimization.stage", result.json["zero_optimization"]["stage"],
                        "use_distributed_optimizer")
        result.differs("the optimizer states are divided among the ranks: less memory, and the same result",
                       "use_distributed_optimizer")
    if settings.is_on("sequence_parallel"):
        result.used("tensor-parallel ranks always share the sequences", "sequence_parallel")
    if settings.is_on("optimizer_cpu_offload") or settings.is_on("cpu_optimizer"):
        result.set_json("zero_optimization.offload_optimizer.device", "cpu",
                        *settings.only("optimizer_cpu_offload", "cpu_optimizer"))
    for name in settings.only("overlap_grad_reduce", "overlap_param_gather"):
        result.set_json("zero_optimization.overlap_comm", settings.is_on(name), name)
    _recompute(settings, result)


def _expert_degree(settings: Settings, result: Result, tensor: int) -> None:
    """Write the number of ranks that share the experts, each of which has complete matrices of some of them.

    Megatron-LM also divides the matrices of each expert among expert_tensor_parallel_size ranks: by default, all
    tensor-parallel ones. Here the degree must be a multiple of these, and a divisor of the number of experts.
    """
    divided, expert = "expert_tensor_parallel_size", settings.first("expert_model_parallel_size",
                                                                    "moe_expert_parallel_size")
    wanted = experts_of(settings)
    if not wanted:
        parts.write_degrees(settings, result, expert=expert)
        result.used("there are no experts", *settings.only(divided))
        return
    ranks, parts_of_each = settings.whole(expert, 1, low=1) if expert else 1, settings.whole(divided, tensor, low=1)
    degrees = [degree for degree in (ranks * parts_of_each, math.lcm(ranks, tensor))
               if degree % tensor == 0 and wanted["num_experts"][0] % degree == 0] or [ranks]
    names = settings.only(expert, divided)
    if degrees[0] == 1:
        result.used("1: nothing to write", *names)
        return
    result.set_json("expert_parallel.enabled", True)
    result.set_json("expert_parallel.autoep_size", degrees[0], *names)
    if parts_of_each > 1:
        result.differs("ranks share complete experts instead of parts of each: the same result",
                       *settings.only(divided))


def _zero_stage(settings: Settings, stages: int, with_json: bool) -> int:
    if settings.has("zero_stage"):
        return int(settings.whole("zero_stage"))
    if settings.is_on("use_torch_fsdp2"):
        return 3
    if settings.is_on("use_megatron_fsdp") or settings.is_on("use_custom_fsdp"):
        stage = settings.choice("data_parallel_sharding_strategy", _SHARDING, "optim_grads_params")
        return min(int(stage), 1) if stages > 1 else int(stage)
    return 0 if with_json else 1


def _recompute(settings: Settings, result: Result) -> None:
    names = settings.only("recompute_granularity", "recompute_method", "recompute_num_layers",
                   "checkpoint_activations", "checkpoint_num_layers", "recompute_activations",
                   "deepspeed_activation_checkpointing")
    granularity = settings.text("recompute_granularity", "none")
    if granularity == "full" or settings.is_on("checkpoint_activations"):
        count = settings.whole("recompute_num_layers", settings.whole("checkpoint_num_layers", 1), low=1)
        is_block = settings.text("recompute_method") == "block"
        parts.write_recompute(result, 1 if is_block else count, *names)
        if is_block:
            result.differs("all blocks are recomputed, and not the first ones of each stage", "recompute_method")
    elif granularity == "selective" or settings.is_on("recompute_activations"):
        result.set_run("recompute", "attention", *names)
    else:
        result.used("off", *names)


def _precision(settings: Settings, result: Result) -> None:
    for name in ("bf16", "fp16"):
        if settings.is_on(name):
            result.set_json(f"{name}.enabled", True, name)
    stage = result.json.get("zero_optimization", {}).get("stage", 0)
    in_fp32 = settings.is_on("accumulate_allreduce_grads_in_fp32")
    if settings.is_on("bf16") and stage >= 1 and "data_types" not in result.json:
        # arguments.py: bf16 accumulates and reduces gradients in fp32
        result.set_json("data_types.grad_accum_dtype", "fp32", "accumulate_allreduce_grads_in_fp32")
    elif in_fp32:
        result.none("MATTERS: ZeRO stage 0 accumulates in the model's precision; stage 1 can accumulate in fp32",
                    "accumulate_allreduce_grads_in_fp32")
    if not settings.is_on("fp16") or "loss_scale" in result.json.get("fp16", {}):
        return
    if settings.has("loss_scale"):
        result.set_json("fp16.loss_scale", settings.number("loss_scale"), "loss_scale")
        return
    initial = settings.number("initial_loss_scale")
    if initial < 1:
        raise settings.wrong("initial_loss_scale", "a number from 1")
    result.set_json("fp16.loss_scale", 0)
    result.set_json("fp16.initial_scale_power", min(int(math.log2(initial)), 32), "initial_loss_scale")
    for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
        result.set_json(f"fp16.{name}", settings.whole(name), name)


def _data(settings: Settings, result: Result) -> None:
    name = settings.first("train_data_path", "data_path")
    parts.write_train_data(settings, result, settings.words(name) if name else [], name)
    for kind in ("valid", "test"):
        words = [word for word in settings.words(f"{kind}_data_path") if not word.replace(".", "").isdigit()]
        parts.write_evaluation_data(result, f"{kind}_data", words, len(words), f"{kind}_data_path")
    chosen = settings.only("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tokenizer_name_or_path")
    path = settings.first("tokenizer_model", "tokenizer_name_or_path")
    is_gpt2 = settings.text("tokenizer_type") == "GPT2BPETokenizer" or settings.has("merge_file")
    parts.write_tokenizer(result, (settings.text(path) if path else "") or ("gpt2" if is_gpt2 else ""), *chosen,
                          why="the tokens are read as they are")
    if settings.is_on("reset_attention_mask") or settings.is_on("reset_position_ids"):
        result.set_run("document_attention", True, *settings.only("reset_attention_mask", "reset_position_ids"))


def _logging(settings: Settings, result: Result) -> None:
    parts.write_load(settings, result, "load", "save")
    parts.write_tensorboard(settings, result)
    if settings.get("wandb_project") not in OFF:
        parts.write_monitor(result, "wandb", {"project": settings.text("wandb_project"),
                                              "team": settings.text("wandb_entity")},
                            *settings.only("wandb_project", "wandb_entity"))
    parts.write_profile(settings, result, "profile_step_start", "profile_step_end", *settings.only(
        "profile", "profile_step_start", "profile_step_end", "use_pytorch_profiler"))
    if settings.is_on("use_mup") and settings.has("mup_base_hidden_size"):
        result.set_run("mup_base_width", settings.needed("mup_base_hidden_size"), "use_mup", "mup_base_hidden_size")
        result.differs("the factors are those of Tensor Programs V for Adam, without multipliers", "use_mup")
    elif settings.has("mup_base_hidden_size"):
        result.none("its switch is off", "mup_base_hidden_size")
    if not settings.has("save_interval"):
        result.set_run("save_interval", 0, "save_interval")
    if settings.get("save_retain_interval") not in OFF:
        result.none("CHECK: --keep_every, with --keep_checkpoints", "save_retain_interval")
