"""What may not be combined in a DeepSpeed JSON: one small function a rule. DeepSpeed 0.19.8 crashes on some of these
combinations in the middle of its set-up, and quietly does something else on the others.
"""

import importlib.util
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

from pretrain.config.arguments import RunArguments
from pretrain.config.ds_json.clean import idle_notes
from pretrain.config.ds_json.optimizers import CPU_OPTIMIZERS, OPTIMIZERS, REQUIRED_SCHEDULER_PARAMS, ZERO_OPTIMIZERS
from pretrain.config.ds_json.schema import DEFAULT_PARTITION_METHOD
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

_ZERO = "zero_optimization"
_NO_ADAM_FUSED = ("set_grad_none",)
_TORCH_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "foreach", "torch_adam", "adam_w_mode")


def check_rules(settings: ResolvedConfig) -> None:
    """Raises ConfigError for the first rule that is broken."""
    for rule in RULES:
        rule(settings)


def offload_needs_a_stage(s: ResolvedConfig) -> None:
    if s.layout.offload_optimizer != "none" and s.layout.zero_stage == 0:
        raise s.error(f"{_ZERO}.offload_optimizer.device", '"none" at stage 0',
                       "set zero_optimization.stage to 1 or more")
    if s.layout.offload_optimizer == "nvme" and s.layout.zero_stage != 3:
        raise s.error(f"{_ZERO}.offload_optimizer.device", f'"none" or "cpu" at stage {s.layout.zero_stage}',
                       "NVMe needs stage 3; at stages 1 and 2 DeepSpeed would quietly use the CPU")


def libaio(s: ResolvedConfig) -> None:
    """Of this machine, not of the JSON."""
    if "nvme" in (s.layout.offload_optimizer, s.layout.offload_param) and find_library("aio") is None:
        raise ConfigError("libaio", found="no such library", expected="libaio, which DeepSpeed's NVMe offload needs",
                          remedy="apt-get install libaio-dev")


def nvme_buffer_size(s: ResolvedConfig) -> None:
    """Each rank's part of a parameter must fit in one buffer: an assertion in the middle of the first step."""
    model = s.model
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    largest = max(model.vocab_size, model.max_positions, model.intermediate_size, qkv) * model.hidden_size
    needed = -(-largest // s.layout.world_size)
    if s.layout.offload_param == "nvme" and s.get(f"{_ZERO}.offload_param.buffer_size", 1e8) < needed:
        raise s.error(f"{_ZERO}.offload_param.buffer_size", f"at least {needed}, a rank's part of the largest matrix",
                       found=s.get(f"{_ZERO}.offload_param.buffer_size", "100000000, the default"))


def stage_3_names(s: ResolvedConfig) -> None:
    own = s.get(_ZERO, {})
    for name in own:
        if name.startswith("stage3_") and name.removeprefix("stage3_") in own:
            raise s.error(f"{_ZERO}.{name}", f'one of "{name}" and "{name.removeprefix("stage3_")}"', found="both")


def zero_plus_plus(s: ResolvedConfig) -> None:
    size = s.get(f"{_ZERO}.zero_hpz_partition_size", 1)
    if size > 1 and s.layout.world_size % size:
        raise s.error(f"{_ZERO}.zero_hpz_partition_size", f"a divisor of the {s.layout.world_size} ranks")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if s.get(f"{_ZERO}.{name}") and s.device.kind == "cpu":
            raise s.error(f"{_ZERO}.{name}", "false on a CPU", "the quantisation kernels are CUDA's")
    if s.layout.zero_stage in (1, 2) and s.get(f"{_ZERO}.allgather_bucket_size", 0) % 2:
        raise s.error(f"{_ZERO}.allgather_bucket_size", "an even number")


def precision_of_device(s: ResolvedConfig) -> None:
    if s.layout.precision == "fp16" and not s.device.fp16 and not s.args.emulate_fp16:
        raise s.error("fp16.enabled", f"a precision that this {s.device.kind} device can compute in",
                       "use bf16, or give --emulate_fp16 (very slow, for tests)")
    if s.layout.precision == "bf16" and not s.device.bf16:
        raise s.error("bf16.enabled", f"a precision that this {s.device.kind} device can compute in",
                       "use fp16 or fp32")
    if s.args.emulate_fp16 and s.layout.precision != "fp16":
        raise ConfigError("--emulate_fp16", found=f"it with {s.layout.precision}", expected="fp16.enabled in the JSON",
                          remedy="leave it out")


def dynamic_loss_scale(s: ResolvedConfig) -> None:
    if s.layout.precision != "fp16" or s.get("fp16.loss_scale", 0) != 0:
        return
    first = 2 ** s.get("fp16.initial_scale_power", 16)
    if not 1 <= s.get("fp16.min_loss_scale", 1) <= first:
        raise s.error("fp16.min_loss_scale", f"1 to {first}, the first scale (2 to the initial_scale_power)")
    if s.get("fp16.loss_scale_window", 1000) < 1:
        raise s.error("fp16.loss_scale_window", "at least 1 with dynamic loss scaling")


def accumulation_dtype(s: ResolvedConfig) -> None:
    dtype = s.layout.grad_accum_dtype or s.layout.precision
    where = "data_types.grad_accum_dtype"
    if dtype not in (s.layout.precision, "fp32"):
        raise s.error(where, f'"{s.layout.precision}", as the model, or "fp32"')
    if dtype != s.layout.precision and s.layout.zero_stage == 0:
        raise s.error(where, f'"{s.layout.precision}" at stage 0',
                      "DeepSpeed accumulates in another type from stage 1 on")
    if s.get("data_types.param_dtype") not in (None, s.layout.precision):
        raise s.error("data_types.param_dtype", f'"{s.layout.precision}", as bf16 and fp16 say', "remove the key")
    if s.get("bf16.immediate_grad_update") and not s.layout.uses_bf16_optimizer:
        raise s.error("bf16.immediate_grad_update", "no such key here",
                       'it acts with bf16 at stage 0, or at stage 1 with "grad_accum_dtype": "fp32" and no offload')


def low_precision_master_weights(s: ResolvedConfig) -> None:
    for block, name in (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads")):
        if not s.get(f"{block}.{name}"):
            continue
        states = s.get("bf16.bf16_optimizer_states") and block == "bf16"
        offloaded = s.layout.offload_optimizer != "none" and s.layout.optimizer in ("adam", "adamw")
        if s.layout.precision != block or s.layout.zero_stage == 0:
            raise s.error(f"{block}.{name}", f"{block} and ZeRO stage 1, 2 or 3 with it")
        if not offloaded and not (states and s.layout.offload_optimizer == "none"):
            raise s.error(f"{block}.{name}", 'Adam on the CPU: zero_optimization.offload_optimizer.device "cpu"')
    if s.get("bf16.bf16_optimizer_states") and not s.get("bf16.bf16_master_weights_and_grads"):
        raise s.error("bf16.bf16_optimizer_states", "bf16_master_weights_and_grads true with it")


def gradient_scaling(s: ResolvedConfig) -> None:
    scales = (s.get("prescale_gradients"), s.get("gradient_predivide_factor", 1.0) != 1.0)
    for name, given in zip(("prescale_gradients", "gradient_predivide_factor"), scales, strict=True):
        if given and s.layout.zero_stage >= 2:
            raise s.error(name, f"no such key at ZeRO stage {s.layout.zero_stage}",
                          "DeepSpeed has it at stages 0 and 1")


def optimizer_places(s: ResolvedConfig) -> None:
    kind = s.get("optimizer.type")
    if s.layout.offload_optimizer != "none" and s.layout.optimizer not in CPU_OPTIMIZERS:
        raise s.error("optimizer.type", "Adam, AdamW, Lion or Adagrad, which run on the CPU",
                       "or remove zero_optimization.offload_optimizer")
    if s.layout.optimizer == "adagrad" and s.layout.zero_stage > 0 and s.layout.offload_optimizer == "none":
        raise s.error("optimizer.type", 'zero_optimization.offload_optimizer.device "cpu" for Adagrad with ZeRO',
                       "otherwise DeepSpeed builds it anew without its parameter groups; or use AdamW")
    tested = s.layout.optimizer in ZERO_OPTIMIZERS
    if s.layout.zero_stage > 0 and not tested and not s.get("zero_allow_untested_optimizer"):
        raise s.error("optimizer.type", f'"zero_allow_untested_optimizer": true for {kind} with ZeRO',
                       "or use Adam, AdamW, Lion, Muon or Adagrad")
    if s.layout.optimizer in ("lion", "lamb") and s.device.kind == "cpu" and s.layout.offload_optimizer == "none":
        offload = ' or offload it: zero_optimization.offload_optimizer.device "cpu"'
        raise s.error("optimizer.type", "an optimizer that runs on this CPU device",
                      "use AdamW" + offload * (s.layout.optimizer == "lion"))
    if s.layout.optimizer == "lamb" and s.layout.precision == "fp16" and s.get("fp16.loss_scale"):
        raise s.error("optimizer.type", "dynamic loss scaling (fp16.loss_scale 0) for Lamb")


def muon_places(s: ResolvedConfig) -> None:
    if s.layout.optimizer != "muon":
        return
    if s.layout.zero_stage == 0 or s.layout.uses_bf16_optimizer:
        raise s.error("optimizer.type", "ZeRO stage 1 to 3, without fp32 accumulation at stage 1, for Muon")
    if s.layout.zero_stage == 3 and s.get(f"{_ZERO}.reduce_scatter", True):
        raise s.error(f"{_ZERO}.reduce_scatter", "false for Muon at stage 3", "Muon needs whole gradients",
                       found="true")


def optimizer_arguments(s: ResolvedConfig) -> None:
    """Keys that the class which DeepSpeed picks for this type, device and place does not take or does not heed."""
    params = s.get("optimizer.params", {})
    if s.layout.optimizer not in OPTIMIZERS:
        return
    offloaded = s.layout.offload_optimizer != "none"
    for name in params:
        where = f"optimizer.params.{name}"
        if name == "adam_w_mode" and s.layout.optimizer == "adamw" and params[name] is False:
            raise s.error(where, "true with AdamW", 'use "type": "Adam" for weight decay inside the gradient')
        if params.get("torch_adam") and s.layout.optimizer != "muon" and name not in _TORCH_ADAM_KEYS:
            raise s.error(where, 'no such key with "torch_adam": true', "torch.optim.AdamW does not take it")
        if name == "foreach" and not params.get("torch_adam"):
            raise s.error(where, 'no such key without "torch_adam": true', "remove it")
        if name == "fp32_optimizer_states" and not offloaded:
            raise s.error(where, "no such key without offload_optimizer", "it acts on CPU optimizers; remove it")
        if name in (*_NO_ADAM_FUSED, "lr_decay", "initial_accumulator_value") and offloaded:
            raise s.error(where, "no such key with offload_optimizer", "CPU optimizers do not take it; remove it")
    if s.get("optimizer.legacy_fusion"):
        raise s.error("optimizer.legacy_fusion", "false", "it is for checkpoints of old versions; remove it")


def torch_arguments(s: ResolvedConfig) -> None:
    """Reject what torch.optim's own constructors and steps would reject."""
    params = s.get("optimizer.params", {})
    if params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        raise s.error("optimizer.params.nesterov", "false without momentum, or with dampening")
    low, high = params.get("etas", (0.5, 1.2))
    if not low < 1 < high:
        raise s.error("optimizer.params.etas", "one below 1 and one above 1")
    if params.get("foreach") and params.get("fused"):
        raise s.error("optimizer.params.fused", "one of foreach and fused")
    if params.get("capturable") and s.device.kind == "cpu":
        raise s.error("optimizer.params.capturable", "false on a CPU")


def scheduler_params(s: ResolvedConfig) -> None:
    kind = s.get("scheduler.type")
    for name in REQUIRED_SCHEDULER_PARAMS.get(kind, ()):
        if s.get(f"scheduler.params.{name}") is None:
            raise s.error(f"scheduler.params.{name}", f"a value: {kind} needs it", found="nothing")
    if kind is None:
        return
    lowest, highest = (s.get(f"scheduler.params.cycle_{end}_lr", 0) for end in ("min", "max"))
    if lowest > highest:
        raise s.error("scheduler.params.cycle_min_lr", f"at most cycle_max_lr, {highest}")
    total, warmup = s.get("scheduler.params.total_num_steps"), s.get("scheduler.params.warmup_num_steps", 0)
    if total is not None and warmup >= total:
        raise s.error("scheduler.params.warmup_num_steps", f"less than total_num_steps, {total}")
    unset = RunArguments()
    for name in ("lr_schedule", "lr_warmup_steps", "lr_decay_steps", "lr_wsd_steps", "min_lr_ratio"):
        value = getattr(s.args, name)
        fills = name == "lr_warmup_steps" and s.file.get("scheduler.params.warmup_num_steps") == "auto"
        if value != getattr(unset, name) and not fills:
            raise ConfigError(f"--{name}", found=value, expected=f'no value beside the JSON\'s scheduler, "{kind}"',
                              remedy='remove the flag, or the "scheduler" block')


def measuring(s: ResolvedConfig) -> None:
    for name, on in (("wall_clock_breakdown", s.get("wall_clock_breakdown")),
                     ("flops_profiler.enabled", s.get("flops_profiler.enabled"))):
        if on and s.layout.pipeline_stages > 1:
            raise s.error(name, f"false with {s.layout.pipeline_stages} pipeline stages",
                          "DeepSpeed's timers crash there")
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        if s.get(f"{name}.enabled") and importlib.util.find_spec(package) is None:
            raise s.error(f"{name}.enabled", f"the package {package} installed", f"pip install {package}")
    if s.get("aio.use_gds") and s.device.kind == "cpu":
        raise s.error("aio.use_gds", "false on a CPU")


def report_folders(s: ResolvedConfig) -> None:
    """Folders of monitors and the profiler must be writable on this machine: DeepSpeed would fail during the start."""
    places = [(f"{name}.output_path", s.get(f"{name}.output_path")) for name in ("tensorboard", "csv_monitor")
              if s.get(f"{name}.enabled")]
    if s.get("flops_profiler.enabled") and s.get("flops_profiler.output_file"):
        places.append(("flops_profiler.output_file", str(Path(s.get("flops_profiler.output_file")).parent)))
    for where, place in places:
        check_folder(Path(place), s.file.where(where))


def notes(s: ResolvedConfig) -> tuple[str, ...]:
    """What is worth knowing about the JSON: keys without an effect, and where the optimizer comes from."""
    said = idle_notes(s.idle)
    if "optimizer" not in s.file.values:
        values = {**s.get("optimizer.params")}
        values.pop("torch_adam", None)
        said.append('the JSON has no "optimizer": AdamW with ' + ", ".join(f"{name} {value}" for name, value in
                    values.items()) + ", from the flags and their defaults")
    if s.layout.pipeline_stages == 1 and s.layout.partition_method != DEFAULT_PARTITION_METHOD:
        said.append("pipeline.partition_method: no effect with one stage")
    interval = s.file.get("steps_per_print")
    if isinstance(interval, (int, float)) and interval <= s.train_steps:
        if s.layout.zero_stage < 2:  # PipelineEngine prints, whatever the log level
            said.append("steps_per_print: DeepSpeed prints lines of its own between those of the run")
        elif s.args.deepspeed_log_level not in ("debug", "info") and not s.get("wall_clock_breakdown"):
            said.append("steps_per_print: no effect without --deepspeed_log_level info")
    return tuple(said)


RULES: tuple[Callable[[ResolvedConfig], None], ...] = (
    precision_of_device, offload_needs_a_stage, stage_3_names, zero_plus_plus, accumulation_dtype,
    low_precision_master_weights, gradient_scaling, optimizer_places, muon_places, optimizer_arguments,
    dynamic_loss_scale, libaio, nvme_buffer_size, scheduler_params, torch_arguments, measuring,
    report_folders,
)
