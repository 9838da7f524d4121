"""Rules for ZeRO stages, offload and precision."""

from ctypes.util import find_library

from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError

_ZERO = "zero_optimization"
_OFFLOAD_DEVICE = f"{_ZERO}.offload_optimizer.device"


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


def operators_without_nvcc(run: ResolvedConfig) -> None:
    """Reject what needs a compiled CUDA operator on a GPU without a fitting nvcc. Adam has a substitute."""
    if run.device.kind != "cuda" or run.device.compiles:
        return
    remedy = "install the CUDA toolkit of the version that torch was built for, and set CUDA_HOME"
    problem = "it is a CUDA operator that DeepSpeed compiles, and there is no nvcc of torch's CUDA version"
    if run.layout.optimizer in ("lion", "lamb") and run.layout.offload_optimizer == "none":
        raise run.error("optimizer.type", problem=problem, remedy=f"use AdamW, or {remedy}")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if run.get(f"{_ZERO}.{name}"):
            raise run.error(f"{_ZERO}.{name}", problem=problem, remedy=f"set it to false, or {remedy}")
    for block in ("offload_optimizer", "offload_param"):
        if run.get(f"{_ZERO}.{block}.device") == "nvme":
            raise run.error(f"{_ZERO}.{block}.device", problem=problem, remedy=f'use "cpu", or {remedy}')


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


def quantized_weights(run: ResolvedConfig) -> None:
    """Reject matrices of which a rank's part is not a multiple of 8 elements: DeepSpeed's quantizer would fail.

    (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, CUDAQuantizer.quantize)
    """
    model, key, ranks = run.model, f"{_ZERO}.zero_quantized_weights", run.layout.zero_size
    if not run.get(key):
        return
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    for rows in (model.vocab_size, model.intermediate_size, qkv, model.num_heads * model.head_size):
        if -(-rows * model.hidden_size // ranks) % 8:
            raise run.error(key, problem=f"each of the {ranks} ranks has a part of a matrix of {rows} x "
                            f"{model.hidden_size}, and its elements are not a multiple of 8",
                            remedy="remove the key, or use another number of ranks; --model_overrides can pad the "
                                   "vocabulary to a multiple of 128")


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
    if run.args.tf32 and not run.device.bf16:  # both came with compute capability 8.0
        raise ConfigError("--tf32", problem="this GPU has no TF32: it would multiply in fp32",
                          remedy="leave --tf32 out")


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
