"""Rules for combinations of settings, one small function for each.

DeepSpeed 0.19.8 crashes during set-up on some of the rejected combinations, and silently does something else on the
others.
"""

import importlib.util
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

from pretrain.config.ds_json.optimizers import CPU_OPTIMIZERS, OPTIMIZERS, REQUIRED_SCHEDULER_PARAMS, ZERO_OPTIMIZERS
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

_ZERO = "zero_optimization"
_OFFLOAD_DEVICE = f"{_ZERO}.offload_optimizer.device"
# DeepSpeed's GPU optimizers take these parameters, its CPU optimizers do not.
_GPU_ONLY_PARAMS = ("set_grad_none", "lr_decay", "initial_accumulator_value")
_TORCH_ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "foreach", "torch_adam", "adam_w_mode")


def check_rules(run: ResolvedConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    for rule in RULES:
        rule(run)


def offload_needs_a_zero_stage(run: ResolvedConfig) -> None:
    device, zero_stage = run.layout.offload_optimizer, run.layout.zero_stage
    if device != "none" and zero_stage == 0:
        raise run.error(_OFFLOAD_DEVICE, expected='"none" at ZeRO stage 0',
                        remedy="set zero_optimization.stage to 1 or more")
    if device == "nvme" and zero_stage != 3:
        raise run.error(_OFFLOAD_DEVICE, expected=f'"none" or "cpu" at ZeRO stage {zero_stage}',
                        remedy="NVMe needs stage 3; at stages 1 and 2 DeepSpeed would silently use the CPU")


def libaio(run: ResolvedConfig) -> None:
    """Reject NVMe offload on a machine without libaio."""
    if "nvme" in (run.layout.offload_optimizer, run.layout.offload_param) and find_library("aio") is None:
        raise ConfigError("libaio", problem="DeepSpeed's NVMe offload needs this library, which is not installed",
                          remedy="apt-get install libaio-dev")


def nvme_buffer_size(run: ResolvedConfig) -> None:
    """Reject a buffer smaller than a rank's part of the largest matrix: an assertion would fail in the first step."""
    model, key = run.model, f"{_ZERO}.offload_param.buffer_size"
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    largest = max(model.vocab_size, model.max_positions, model.intermediate_size, qkv) * model.hidden_size
    needed = -(-largest // run.layout.world_size)
    if run.layout.offload_param == "nvme" and run.layout.offload_param_buffer_size < needed:
        raise run.error(key, found=run.get(key, "100000000, the default"),
                        expected=f"at least {needed}, a rank's part of the largest matrix")


def stage_3_names(run: ResolvedConfig) -> None:
    keys = run.get(_ZERO, {})
    for name in keys:
        other = name.removeprefix("stage3_")
        if name != other and other in keys:
            raise run.error(f"{_ZERO}.{name}", found="both", expected=f'one of "{name}" and "{other}"')


def zero_plus_plus(run: ResolvedConfig) -> None:
    size, world_size = run.layout.hpz_partition_size, run.layout.world_size
    if size > 1 and world_size % size:
        raise run.error(f"{_ZERO}.zero_hpz_partition_size", expected=f"a divisor of the {world_size} ranks")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if run.get(f"{_ZERO}.{name}") and run.device.kind == "cpu":
            raise run.error(f"{_ZERO}.{name}", expected="false on a CPU",
                            remedy="DeepSpeed's quantization kernels need CUDA")


def even_allgather_bucket(run: ResolvedConfig) -> None:
    if run.layout.zero_stage in (1, 2) and run.get(f"{_ZERO}.allgather_bucket_size", 0) % 2:
        raise run.error(f"{_ZERO}.allgather_bucket_size", expected="an even number")


def precision_of_device(run: ResolvedConfig) -> None:
    precision, device = run.layout.precision, run.device
    supported = f"a precision that this {device.kind} device supports"
    if precision == "fp16" and not device.fp16 and not run.args.emulate_fp16:
        raise run.error("fp16.enabled", expected=supported,
                        remedy="use bf16, or give --emulate_fp16 (very slow, for tests)")
    if precision == "bf16" and not device.bf16:
        raise run.error("bf16.enabled", expected=supported, remedy="use fp16 or fp32")
    if run.args.emulate_fp16 and precision != "fp16":
        raise ConfigError("--emulate_fp16", problem='it needs "fp16": {"enabled": true} in the JSON, which selects '
                          f"{precision}", remedy="leave --emulate_fp16 out")


def tf32_needs_fp32_on_cuda(run: ResolvedConfig) -> None:
    if run.args.tf32 and (run.device.kind != "cuda" or run.layout.precision != "fp32"):
        raise ConfigError("--tf32", found=f"a run in {run.layout.precision} on {run.device.kind}",
                          expected="an fp32 run on cuda: nothing else multiplies in TF32", remedy="leave --tf32 out")


def dynamic_loss_scale(run: ResolvedConfig) -> None:
    if run.layout.precision != "fp16" or run.get("fp16.loss_scale", 0) != 0:
        return
    initial = 2 ** run.get("fp16.initial_scale_power", 16)
    if not 1 <= run.get("fp16.min_loss_scale", 1) <= initial:
        raise run.error("fp16.min_loss_scale",
                        expected=f"1 to {initial}, the initial scale (2 to the power of initial_scale_power)")
    if run.get("fp16.loss_scale_window", 1000) < 1:
        raise run.error("fp16.loss_scale_window", expected="at least 1 with dynamic loss scaling")


def accumulation_dtype(run: ResolvedConfig) -> None:
    layout, key = run.layout, "data_types.grad_accum_dtype"
    dtype = layout.grad_accum_dtype or layout.precision
    if dtype not in (layout.precision, "fp32"):
        raise run.error(key, expected=f'"{layout.precision}", the model\'s precision, or "fp32"')
    if dtype != layout.precision and layout.zero_stage == 0:
        raise run.error(key, expected=f'"{layout.precision}" at ZeRO stage 0',
                        remedy="DeepSpeed accumulates in another type from stage 1 on")
    if run.get("data_types.param_dtype") not in (None, layout.precision):
        raise run.error("data_types.param_dtype", expected=f'"{layout.precision}", which bf16 and fp16 select',
                        remedy="remove the key")
    if run.get("bf16.immediate_grad_update") and not layout.uses_bf16_optimizer:
        raise run.error("bf16.immediate_grad_update", problem="the key has no effect in this run",
                        remedy='it needs bf16 at ZeRO stage 0, or at stage 1 with "grad_accum_dtype": "fp32" and '
                               "without offload; remove the key")


def low_precision_master_weights(run: ResolvedConfig) -> None:
    layout = run.layout
    bf16_states = run.get("bf16.bf16_optimizer_states")
    for precision in ("fp16", "bf16"):
        key = f"{precision}.{precision}_master_weights_and_grads"
        if not run.get(key):
            continue
        if layout.precision != precision or layout.zero_stage == 0:
            raise run.error(key, problem=f"the key needs {precision} and ZeRO stage 1, 2 or 3")
        cpu_adam = layout.offload_optimizer != "none" and layout.optimizer in ("adam", "adamw")
        gpu_states = precision == "bf16" and bf16_states and layout.offload_optimizer == "none"
        if not cpu_adam and not gpu_states:
            raise run.error(key, problem=f'the key needs Adam on the CPU: {_OFFLOAD_DEVICE} "cpu"')
    if bf16_states and not run.get("bf16.bf16_master_weights_and_grads"):
        raise run.error("bf16.bf16_optimizer_states", problem='the key needs "bf16_master_weights_and_grads": true')


def gradient_scaling(run: ResolvedConfig) -> None:
    predivides = run.get("gradient_predivide_factor", 1.0) != 1.0
    for name, is_set in (("prescale_gradients", run.get("prescale_gradients")),
                         ("gradient_predivide_factor", predivides)):
        if is_set and run.layout.zero_stage >= 2:
            raise run.error(name, problem=f"the key has no effect at ZeRO stage {run.layout.zero_stage}",
                            remedy="DeepSpeed reads it at stages 0 and 1; remove the key")


def optimizer_of_device(run: ResolvedConfig) -> None:
    layout, kind = run.layout, run.get("optimizer.type")
    if layout.offload_optimizer != "none" and layout.optimizer not in CPU_OPTIMIZERS:
        raise run.error("optimizer.type", expected="Adam, AdamW, Lion or Adagrad, which run on the CPU",
                        remedy="or remove zero_optimization.offload_optimizer")
    if layout.optimizer == "adagrad" and layout.zero_stage > 0 and layout.offload_optimizer == "none":
        raise run.error("optimizer.type", expected=f'{_OFFLOAD_DEVICE} "cpu" for Adagrad with ZeRO',
                        remedy="otherwise DeepSpeed rebuilds the optimizer without its parameter groups; or use AdamW")
    untested = layout.zero_stage > 0 and layout.optimizer not in ZERO_OPTIMIZERS
    if untested and not run.get("zero_allow_untested_optimizer"):
        raise run.error("optimizer.type", expected=f'"zero_allow_untested_optimizer": true for {kind} with ZeRO',
                        remedy="or use Adam, AdamW, Lion, Muon or Adagrad")
    if layout.optimizer in ("lion", "lamb") and run.device.kind == "cpu" and layout.offload_optimizer == "none":
        offload = f' or offload it: {_OFFLOAD_DEVICE} "cpu"' if layout.optimizer == "lion" else ""
        raise run.error("optimizer.type", expected="an optimizer that runs on this CPU device",
                        remedy=f"use AdamW{offload}")
    if layout.optimizer == "lamb" and layout.precision == "fp16" and run.get("fp16.loss_scale"):
        raise run.error("optimizer.type", expected="dynamic loss scaling (fp16.loss_scale 0) for Lamb")


def muon(run: ResolvedConfig) -> None:
    layout = run.layout
    if layout.optimizer != "muon":
        return
    if layout.zero_stage == 0 or layout.uses_bf16_optimizer:
        raise run.error("optimizer.type", expected="ZeRO stage 1 to 3, without fp32 accumulation at stage 1, for Muon")
    if layout.zero_stage == 3 and layout.reduce_scatter:
        raise run.error(f"{_ZERO}.reduce_scatter", found="true", expected="false for Muon at ZeRO stage 3",
                        remedy="Muon needs complete gradients on each rank")


def optimizer_params(run: ResolvedConfig) -> None:
    """Reject parameters that are ignored or not accepted by the optimizer class that DeepSpeed selects."""
    params, optimizer = run.get("optimizer.params", {}), run.layout.optimizer
    if optimizer not in OPTIMIZERS:
        return
    offloaded, torch_adam = run.layout.offload_optimizer != "none", params.get("torch_adam")
    for name in params:
        key = f"optimizer.params.{name}"
        if name == "adam_w_mode" and optimizer == "adamw" and params[name] is False:
            raise run.error(key, expected="true with AdamW",
                            remedy='use "type": "Adam" for weight decay inside the gradient')
        if torch_adam and optimizer != "muon" and name not in _TORCH_ADAM_PARAMS:
            raise run.error(key, problem='torch.optim.AdamW, which "torch_adam": true selects, does not take it',
                            remedy="remove it")
        if name == "foreach" and not torch_adam:
            raise run.error(key, problem='it needs "torch_adam": true', remedy="remove it")
        if name == "fp32_optimizer_states" and not offloaded:
            raise run.error(key, problem="it has no effect without offload_optimizer", remedy="remove it")
        if name in _GPU_ONLY_PARAMS and offloaded:
            raise run.error(key, problem="DeepSpeed's CPU optimizers do not take it", remedy="remove it")
    if run.get("optimizer.legacy_fusion"):
        raise run.error("optimizer.legacy_fusion", expected="false",
                        remedy="it is for checkpoints of old versions; remove it")


def torch_optimizer_params(run: ResolvedConfig) -> None:
    """Reject values that torch.optim's constructors and steps reject."""
    params = run.get("optimizer.params", {})
    if params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        raise run.error("optimizer.params.nesterov", expected="false without momentum, or with dampening")
    low, high = params.get("etas", (0.5, 1.2))
    if not low < 1 < high:
        raise run.error("optimizer.params.etas", expected="one value below 1 and one above 1")
    if params.get("foreach") and params.get("fused"):
        raise run.error("optimizer.params.fused", problem="foreach and fused exclude each other",
                        remedy="remove one of them")
    if params.get("capturable") and run.device.kind == "cpu":
        raise run.error("optimizer.params.capturable", expected="false on a CPU")


def scheduler_params(run: ResolvedConfig) -> None:
    kind = run.get("scheduler.type")
    if kind is None:
        return
    for name in REQUIRED_SCHEDULER_PARAMS.get(kind, ()):
        if run.get(f"scheduler.params.{name}") is None:
            raise run.error(f"scheduler.params.{name}", problem=f"the value is missing, and {kind} needs it")
    lowest, highest = (run.get(f"scheduler.params.cycle_{end}_lr", 0) for end in ("min", "max"))
    if lowest > highest:
        raise run.error("scheduler.params.cycle_min_lr", expected=f"at most cycle_max_lr, {highest}")
    total, warmup = run.get("scheduler.params.total_num_steps"), run.get("scheduler.params.warmup_num_steps", 0)
    if total is not None and warmup >= total:
        raise run.error("scheduler.params.warmup_num_steps", expected=f"less than total_num_steps, {total}")


def one_scheduler(run: ResolvedConfig) -> None:
    """Reject --lr_* flags if the JSON has a scheduler: DeepSpeed would ignore the flags."""
    kind = run.get("scheduler.type")
    if kind is None:
        return
    defaults = RunArguments()
    for name in ("lr_schedule", "lr_warmup_steps", "lr_decay_steps", "lr_wsd_steps", "min_lr_ratio"):
        value = getattr(run.args, name)
        fills_auto = name == "lr_warmup_steps" and run.file.get("scheduler.params.warmup_num_steps") == "auto"
        if value != getattr(defaults, name) and not fills_auto:
            raise ConfigError(f"--{name}", problem=f'the JSON has its own scheduler, "{kind}", which ignores this flag',
                              remedy='remove the flag, or the "scheduler" block')


def document_attention(run: ResolvedConfig) -> None:
    """Reject frequencies that depend on the length of a sequence: a document would differ from the same one alone."""
    if run.args.document_attention and run.args.seq_length > run.model.max_positions:
        raise ConfigError("--document_attention", found=f"--seq_length {run.args.seq_length} with dynamic RoPE scaling",
                          expected=f"at most {run.model.max_positions} tokens, the model's "
                                   f"{run.model.key('max_positions')}",
                          remedy="beyond them, the frequencies depend on the length of the sample; use a smaller "
                                 "--seq_length, or another rope_type")


def exit_step_within_run(run: ResolvedConfig) -> None:
    if run.args.exit_step is not None and run.args.exit_step > run.train_steps:
        raise ConfigError("--exit_step", found=run.args.exit_step,
                          expected=f"at most the run's {run.train_steps} steps")


def measuring(run: ResolvedConfig) -> None:
    for name, is_on in (("wall_clock_breakdown", run.get("wall_clock_breakdown")),
                        ("flops_profiler.enabled", run.get("flops_profiler.enabled"))):
        if is_on and run.layout.pipeline_stages > 1:
            raise run.error(name, expected=f"false with {run.layout.pipeline_stages} pipeline stages",
                            remedy="DeepSpeed's timers crash there")
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        if run.get(f"{name}.enabled") and importlib.util.find_spec(package) is None:
            raise run.error(f"{name}.enabled", problem=f"it needs the package {package}, which is not installed",
                            remedy=f"pip install {package}")
    if run.get("aio.use_gds") and run.device.kind == "cpu":
        raise run.error("aio.use_gds", expected="false on a CPU")


def writable_folders(run: ResolvedConfig) -> None:
    """Check the folders of offload, monitors and profiler. Without this check, DeepSpeed fails after the start."""
    for block in ("offload_optimizer", "offload_param"):
        key = f"{_ZERO}.{block}.nvme_path"
        if run.get(f"{_ZERO}.{block}.device") == "nvme":
            folder = Path(run.get(key)).parent  # the last part is the run's own folder
            if not folder.is_dir():
                raise run.error(key, problem=f"there is no folder {folder}", remedy="make it first")
            check_folder(folder, run.file.where(key))
    for name in ("tensorboard", "csv_monitor"):
        if run.get(f"{name}.enabled"):
            check_folder(Path(run.get(f"{name}.output_path")), run.file.where(f"{name}.output_path"))
    output_file = run.get("flops_profiler.output_file")
    if run.get("flops_profiler.enabled") and output_file:
        check_folder(Path(output_file).parent, run.file.where("flops_profiler.output_file"))


RULES: tuple[Callable[[ResolvedConfig], None], ...] = (
    precision_of_device, offload_needs_a_zero_stage, stage_3_names, zero_plus_plus, even_allgather_bucket,
    accumulation_dtype, low_precision_master_weights, gradient_scaling, optimizer_of_device, muon, optimizer_params,
    dynamic_loss_scale, libaio, nvme_buffer_size, scheduler_params, one_scheduler, torch_optimizer_params, measuring,
    writable_folders, tf32_needs_fp32_on_cuda, document_attention, exit_step_within_run,
)
