"""Settings of torchtitan: TOML files of v0.2.2 (torchtitan/config/job_config.py), and names of later versions."""

import json

from pretrain.errors import ConfigError
from pretrain.extensions.translate import parts
from pretrain.extensions.translate.flags import Rates, copy_flags, write_schedule
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import OFF, Settings, flavor_of
from pretrain.model.config import find_config, model_config_from

_OPTIMIZERS = {"AdamW": "AdamW", "Adam": "Adam"}
# names after v0.2.2
_SEQ_LENGTH = "training.max_context_length"
_MICRO_TOKENS, _STEP_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
_SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}


def translate_torchtitan(settings: Settings, result: Result) -> None:
    """Translate a TOML of torchtitan."""
    _model(settings, result)
    kind = settings.choice("optimizer.name", _OPTIMIZERS)
    parts.write_optimizer(settings, result, kind, "optimizer.name")
    if kind == "Adam":
        result.set_json("optimizer.params.adam_w_mode", False, "optimizer.name")
    if result.json["optimizer"]["params"]["weight_decay"]:
        result.set_run("decay_vectors", True, "optimizer.weight_decay")
    _batch(settings, result)
    _schedule(settings, result)
    _layout(settings, result)
    _recompute(settings, result)
    _others(settings, result)
    copy_flags(settings, result, without=("eval_interval", "eval_steps", "save", "save_interval"))


def _model(settings: Settings, result: Result) -> None:
    name, flavor = settings.text("model.name"), settings.text("model.flavor")
    # flavors that only choose the kernel of attention
    plain = flavor.removesuffix("_flex").removesuffix("_varlen")
    found = flavor_of(name, plain) or flavor_of(name, plain.removesuffix("_flex_attn").removesuffix("_varlen_attn"))
    if found is None:
        raise ConfigError(settings.where("model.flavor"), problem=f"the model {name} {flavor} is not in the table of "
                          "models", remedy="llama3 and qwen3 with the flavors of torchtitan v0.2.2 are; for others, "
                          "give --model a preset or a config.json")
    values = dict(found)
    config = json.loads(find_config(str(values.pop("preset"))).read_text(encoding="utf-8"))
    result.model.update({**config, **values})
    model_config_from(result.model, f"{name} {flavor}")
    names = settings.only("model.name", "model.flavor") or ["model.flavor"]
    result.used(f"config.json: {name} {flavor}", *names)
    result.differs("matrices have the standard deviation 0.02 here; torchtitan divides that of projections into the "
                   "residual stream by sqrt(2 x number of the layer), and has 1 for embeddings", *names)
    if plain != flavor:
        result.set_run("document_attention", True, *names)


def _batch(settings: Settings, result: Result) -> None:
    seq_name = settings.first(_SEQ_LENGTH) or "training.seq_len"
    seq_length = settings.whole(seq_name, low=1)
    result.set_run("seq_length", seq_length, seq_name)
    # versions after v0.2.2 count tokens
    micro = _samples(settings, _MICRO_TOKENS, seq_length) or settings.whole("training.local_batch_size", low=1)
    total = _samples(settings, _STEP_TOKENS, seq_length) or settings.number("training.global_batch_size", -1)
    result.set_json("train_micro_batch_size_per_gpu", micro,
                    *settings.only("training.local_batch_size", _MICRO_TOKENS) or ["training.local_batch_size"])
    names = settings.only("training.global_batch_size", _STEP_TOKENS)
    if total > 0:
        if total != int(total):
            raise settings.wrong("training.global_batch_size", "a whole number")
        result.set_json("train_batch_size", int(total), *names)
    else:
        result.set_json("gradient_accumulation_steps", 1, *names)
    stages = settings.whole("parallelism.pipeline_parallel_degree", 1)
    if stages > 1:  # the local batch is divided into micro-batches of the pipeline
        size = settings.whole("parallelism.pipeline_parallel_microbatch_size", 1, low=1)
        if micro % size:
            raise settings.wrong("parallelism.pipeline_parallel_microbatch_size", f"a divisor of {micro}")
        result.set_json("train_micro_batch_size_per_gpu", size, "parallelism.pipeline_parallel_microbatch_size")
        if total <= 0:
            result.set_json("gradient_accumulation_steps", micro // size, "training.local_batch_size")
    result.set_run("train_steps", settings.whole("training.steps", low=1), "training.steps")


def _samples(settings: Settings, name: str, seq_length: int) -> int | None:
    """Return a number of tokens in samples. Raises ConfigError if they are no whole number of them."""
    tokens: int | None = settings.whole(name, low=1)
    if tokens is not None and tokens % seq_length:
        raise settings.wrong(name, f"a multiple of the sequence length, {seq_length}")
    return None if tokens is None else tokens // seq_length


def _schedule(settings: Settings, result: Result) -> None:
    """Write the schedule (build_lr_schedulers in torchtitan/components/optimizer/lr_scheduler.py).

    The peak lasts one step at least, and the lowest rate would be reached one step after the last one.
    """
    steps = settings.whole("training.steps", low=1)
    total = settings.whole("lr_scheduler.total_steps", steps, low=1)
    warmup = min(settings.whole("lr_scheduler.warmup_steps"), total)
    ratio = settings.number("lr_scheduler.decay_ratio")
    decay = min(round(total * ratio), total - warmup) if ratio is not None else total - warmup
    shape = settings.choice("lr_scheduler.decay_type", _SHAPES)
    peak = float(result.json["optimizer"]["params"]["lr"])
    names = ["lr_scheduler.decay_type", *settings.only("lr_scheduler.decay_ratio")]
    rates = Rates("wsd", warmup, total + 1, lowest=peak * settings.number("lr_scheduler.min_lr_factor"), peak=peak,
                  counts_from_0=False, wsd=decay, shape=shape)
    write_schedule(result, rates, kind=names, warmup=["lr_scheduler.warmup_steps"], length=steps, wsd=names,
                   end=settings.only("lr_scheduler.total_steps"), lowest=["lr_scheduler.min_lr_factor"])


def _layout(settings: Settings, result: Result) -> None:
    parts.write_degrees(
        settings, result, tensor="parallelism.tensor_parallel_degree", pipeline="parallelism.pipeline_parallel_degree",
        sequence="parallelism.context_parallel_degree", expert="parallelism.expert_parallel_degree")
    shard = settings.number("parallelism.data_parallel_shard_degree")
    stages = settings.whole("parallelism.pipeline_parallel_degree", 1)
    reshard = settings.text("parallelism.fsdp_reshard_after_forward", "default")
    stage = 0 if shard == 1 else 1 if stages > 1 else 2 if reshard == "never" else 3
    names = settings.only("parallelism.data_parallel_shard_degree", "parallelism.fsdp_reshard_after_forward") or [
        "parallelism.data_parallel_shard_degree"]
    result.set_json("zero_optimization.stage", stage, *names)
    if stages > 1 and shard != 1:
        result.differs("pipelines have ZeRO stage 1: parameters and gradients are not divided", *names)
    replicas = settings.number("parallelism.data_parallel_replicate_degree", 1)
    name = "parallelism.data_parallel_replicate_degree"
    if replicas > 1 and stage == 3:
        result.differs("the states are divided among all ranks; zero_hpz_partition_size keeps parameters in a node",
                       name)
    elif settings.has(name):
        result.used("the data-parallel ranks follow from the number of ranks", name)
    if settings.is_on("training.enable_cpu_offload"):
        for block in ("offload_optimizer", "offload_param")[:2 if stage == 3 else 1]:
            result.set_json(f"zero_optimization.{block}.device", "cpu", "training.enable_cpu_offload")
    _precision(settings, result, stage)


def _precision(settings: Settings, result: Result, stage: int) -> None:
    dtype, compute = settings.text("training.dtype"), settings.text("training.mixed_precision_param")
    names = settings.only("training.dtype", "training.mixed_precision_param") or ["training.mixed_precision_param"]
    if "bfloat16" in (dtype, compute) and (stage or dtype == "bfloat16"):
        result.set_json("bf16.enabled", True, *names)
        if stage:
            result.set_json("data_types.grad_accum_dtype", "fp32", "training.mixed_precision_reduce")
    else:
        result.used("fp32: torchtitan mixes precisions only with FSDP", *names)
    if dtype == "bfloat16":
        result.differs("the optimizer has weights in fp32 here", "training.dtype")


def _recompute(settings: Settings, result: Result) -> None:
    mode = settings.text("activation_checkpoint.mode")
    option = settings.text("activation_checkpoint.selective_ac_option")
    names = settings.only("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option") or [
        "activation_checkpoint.mode"]
    if mode == "full":
        result.set_run("recompute", "blocks", *names[:1])
    elif mode == "selective" and option.isdigit() and int(option) >= 1:
        result.set_run("recompute", "blocks", *names)
        if int(option) > 1:
            result.set_run("recompute_every", int(option), *names)
    elif mode in ("selective", "memory_budget"):
        result.set_run("recompute", "attention", *names)
        result.differs("it chooses single operators there; here attention is recomputed", *names)
    elif mode == "none":
        result.used("off", *names)
    else:
        raise settings.wrong("activation_checkpoint.mode", "full, selective, memory_budget or none")


def _others(settings: Settings, result: Result) -> None:
    named = settings.only("training.dataset", "training.dataset_path")
    parts.no_data(settings, result, *named)
    for name in named:
        result.none("MATTERS: it names text; see what remains to do", name)
    if settings.has("hf_assets_path"):
        parts.write_tokenizer(result, settings.text("hf_assets_path"), "hf_assets_path")
    interval = settings.whole("checkpoint.interval", low=1) if settings.is_on("checkpoint.enable") else 0
    names = settings.only("checkpoint.enable", "checkpoint.interval") or ["checkpoint.enable"]
    result.set_run("save_interval", interval, *names)
    validation = settings.only("validation.enable", "validation.freq", "validation.steps", "validation.dataset")
    if settings.is_on("validation.enable"):
        result.set_run("eval_interval", settings.whole("validation.freq", 10, low=1), "validation.freq",
                       "validation.enable")
        steps = settings.number("validation.steps", -1)
        if steps > 0:
            result.set_run("eval_steps", int(steps), "validation.steps")
        result.remaining.append("--valid_data: torchtitan names a dataset for validation; without it, a part of the "
                                "training data is used")
    else:
        result.set_run("eval_interval", 0, *(validation or ["validation.enable"]))
    parts.write_load(settings, result, "checkpoint.initial_load_path", "checkpoint.folder")
    result.set_run("save", settings.text("dump_folder", "./outputs"), "dump_folder")
    for name, block in (("metrics.enable_tensorboard", "tensorboard"), ("metrics.enable_wandb", "wandb")):
        if settings.get(name) not in OFF and settings.is_on(name):
            parts.write_monitor(result, block, {}, name)
    if settings.is_on("profiler.enable_profiling"):
        every = settings.whole("profiler.profile_freq", 10, low=1)
        result.set_run("profile_steps", f"{every}:{every}", "profiler.enable_profiling", "profiler.profile_freq")
        result.differs("one step is profiled, and not every N-th one", "profiler.profile_freq")
