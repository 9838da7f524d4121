"""Rules for combinations of the layout's settings: parallelism, experts, ZeRO, offload, precision. One row a rule.

DeepSpeed 0.19.8 crashes during set-up on some of the rejected combinations, and silently does something else on the
others. `run_rules.py` has the rows for optimizers, schedulers and flags; `check_rules` there checks all of them.
"""

from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass

from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.ds_json.schema import TREE
from pretrain.config.plan import Plan
from pretrain.config.resolve import EXPERT, SEQUENCE, TENSOR
from pretrain.distributed.device import why_not_nvcc
from pretrain.distributed.requirements import (
    INSTALL,
    NVME_SINCE,
    TENSOR_EXPERTS_AT_ZERO_3_SINCE,
    deepspeed_version,
    is_at_least,
)
from pretrain.errors import ConfigError
from pretrain.model.partition import layer_costs, layer_pattern, stage_bounds, stage_without_block

ZERO = "zero_optimization"
OFFLOAD_DEVICE = f"{ZERO}.offload_optimizer.device"
_QUANTIZED = (f"{ZERO}.zero_quantized_weights", f"{ZERO}.zero_quantized_gradients")
_HPZ = f"{ZERO}.zero_hpz_partition_size"


@dataclass(frozen=True)
class Rule:
    """One row: the condition under which a run is rejected, the setting that the error names, and what to do instead.

    The error has a `problem`, or what was found and expected. By default the value of the setting was found.
    """

    is_broken: object  # its truth value
    where: str  # a key of the JSON, or a flag with its hyphens
    expected: str = ""
    remedy: str = ""
    problem: str = ""
    found: object = None

    def error(self, run: Plan) -> ConfigError:
        """Return the error, with the line of a key of the JSON."""
        in_json = self.where.partition(".")[0] in TREE
        found = self.found
        if found is None and in_json:
            value = run.get(self.where, run.file.get(self.where))  # some keys have another name in `ds_config`
            found = f'"{value}"' if isinstance(value, str) else str(value).lower() if value in (True, False) else value
        elif found is None:
            found = run.args.values().get(self.where.removeprefix("--"))
        return ConfigError(run.file.where(self.where) if in_json else self.where, found=found, expected=self.expected,
                           problem=self.problem, remedy=self.remedy)


def degrees_together(run: Plan) -> Iterator[Rule]:
    """Parallel degrees that no engine here supports together, or that do not divide heads or sequences evenly."""
    layout, model, args = run.layout, run.model, run.args
    tensor, sequence, expert = (layout.tensor_parallel_size, layout.sequence_parallel_size, layout.expert_parallel_size)
    yield Rule(sequence > 1 and layout.pipeline_stages > 1, SEQUENCE, "1 with pipeline stages",
               "DeepSpeed's pipelines ignore it, and would train each rank on complete sequences (defect I of "
               "pretrain/engine/patches/README.md); use ZeRO stage 1, 2 or 3 without stages, or tensor parallelism, "
               "whose ranks share the sequences too")
    yield Rule(sequence > 1 and tensor > 1, SEQUENCE, "1 with tensor parallelism",
               f'Tensor-parallel ranks already share the sequences; set one of "{SEQUENCE}" and "{TENSOR}" to 1')
    yield Rule(expert > 1 and sequence > 1, EXPERT, f'1 with "{SEQUENCE}": {sequence}',
               "no engine here supports both; set one of the two degrees to 1")
    shards = ((TENSOR, tensor), (SEQUENCE, sequence))
    # under sequence parallelism, key and value heads may be copied
    for key, size, kind, number in ((TENSOR, tensor, "attention", model.num_heads),
                                    (TENSOR, tensor, "key and value", model.num_kv_heads),
                                    (SEQUENCE, sequence, "attention", model.num_heads)):
        yield Rule(number % size, key, f"a divisor of the model's {number} {kind} heads",
                   "in attention, each rank computes some of the heads")
    for key, size in shards:
        for flag, length in (("--seq_length", args.seq_length),
                             *(("--seq_length_schedule", length) for _, length in run.seq_lengths.stages)):
            yield Rule(length % size, flag, f"a multiple of {size}",
                       f'"{key}": {size} divides each sequence evenly among its ranks', found=f"length {length}")


def parts_of_matrices(run: Plan) -> Iterator[Rule]:
    """Settings that need complete matrices, or one group of all ranks."""
    layout = run.layout
    tensor, sequence, expert = (layout.tensor_parallel_size, layout.sequence_parallel_size, layout.expert_parallel_size)
    for key, size, reason in ((TENSOR, tensor, "it needs complete matrices, and each rank has a part of them"),
                              (EXPERT, expert, "it needs one matrix at a time, and the experts of a rank are one "
                                               "tensor")):
        yield Rule(not OPTIMIZERS[layout.optimizer].elementwise and size > 1, "optimizer.type",
                   f'Adam, AdamW, Lion, SGD or another elementwise one with "{key}"', f"{reason}; use AdamW")
    yield Rule(layout.hpz_partition_size > 1 and tensor > 1, _HPZ, f'1 with "{TENSOR}"',
               "DeepSpeed would share the secondary copy among tensor-parallel ranks, whose parameters differ; remove "
               "the key")
    for name in _QUANTIZED:
        for key, size in ((TENSOR, tensor), (SEQUENCE, sequence)):
            yield Rule(run.get(name) and size > 1, name, f'false with "{key}": {size}',
                       "DeepSpeed sums the quantized gradients of all ranks as if each had its own samples and the "
                       "same parameters; remove the key")
    for key, size in ((SEQUENCE, sequence), (EXPERT, expert)):
        yield Rule(run.args.compile_blocks and size > 1, "--compile_blocks", "1",
                   "a block is compiled as one graph, which cannot contain the communication between its layers; leave "
                   "--compile_blocks out", found=f'"{key}": {size}')


def models_with_experts(run: Plan) -> Iterator[Rule]:
    """Flags of experts without experts, and settings that mixtures of experts cannot be combined with."""
    layout, args, num_experts = run.layout, run.args, run.model.num_experts
    tensor, expert = layout.tensor_parallel_size, layout.expert_parallel_size
    for name in ("router_aux_loss", "router_z_loss", "expert_capacity_factor"):
        yield Rule(not num_experts and getattr(args, name) != getattr(type(args), name), f"--{name}",
                   problem="the model has no experts",
                   remedy="leave the flag out, or choose a model with experts, such as --model tiny-moe")
    yield Rule(num_experts and layout.sequence_parallel_size > 1, SEQUENCE, "1 for a model with experts",
               "each rank would route only its part of a sequence, and the load-balancing loss would depend on the "
               "ranks; use expert_parallel or ZeRO instead")
    yield Rule(num_experts and expert % tensor, EXPERT, f'a multiple of "{TENSOR}": {tensor}',
               "the experts are divided over tensor-parallel ranks, and then over data-parallel ones; set "
               f'"expert_parallel": {{"enabled": true, "autoep_size": {tensor}}}, or more', found=expert)
    yield Rule(num_experts and tensor > 1 and args.expert_capacity_factor, "--expert_capacity_factor",
               f'0 with "{TENSOR}": {tensor}', "an expert's most probable tokens are those of complete sequences, of "
               "which each rank has a part; leave the flag out")
    for flag, is_given, reason in (
            ("--compile_blocks", args.compile_blocks, "the number of tokens of an expert differs between steps, and "
                                                      "each number would be compiled; leave --compile_blocks out"),
            ("--mup_base_width", args.mup_base_width is not None, "Tensor Programs V gives no rule for routers; leave "
                                                                  "--mup_base_width out")):
        yield Rule(num_experts and is_given, flag, "a model without", reason, found="a model with experts")


def expert_parallelism(run: Plan) -> Iterator[Rule]:
    """Settings with which DeepSpeed 0.19.8 reduces or divides experts wrongly, or not at all."""
    layout, size, num_experts = run.layout, run.layout.expert_parallel_size, run.model.num_experts
    yield Rule(size > 1 and num_experts == 0, EXPERT, "1, because the model has no experts",
               'remove the block "expert_parallel", or choose a mixture-of-experts model')
    yield Rule(num_experts % size, EXPERT, f"a divisor of the model's {num_experts} experts")
    if size == 1:
        return
    # runtime/utils.py, clip_grad_norm_
    yield Rule(layout.zero_stage == 0, f"{ZERO}.stage", "1, 2 or 3 with expert parallelism",
               "at stage 0 DeepSpeed clips by the mean of the ranks' norms; stage 1 also needs less memory", found=0)
    since = TENSOR_EXPERTS_AT_ZERO_3_SINCE
    yield Rule(layout.zero_stage == 3 and layout.tensor_parallel_size > 1 and not is_at_least(since), f"{ZERO}.stage",
               f'1 or 2 with expert parallelism and "{TENSOR}": {layout.tensor_parallel_size}',
               f"DeepSpeed {deepspeed_version()} would clip by a wrong norm; use stage 2, or DeepSpeed {since}")
    for name in (OFFLOAD_DEVICE, f"{ZERO}.offload_param.device"):  # runtime/engine.py, _save_moe_checkpoint
        yield Rule(run.get(name) == "nvme", name, '"cpu" or "none" with expert parallelism',
                   "DeepSpeed does not save experts that are on NVMe")
    for name in (*_QUANTIZED, _HPZ):  # runtime/engine.py, _validate_zero3_moe_compatibility
        value = run.get(name, False)
        yield Rule(value is True or value > 1, name, problem="DeepSpeed's ZeRO++ does not support expert parallelism",
                   remedy="remove the key")
    for name in (f"{ZERO}.contiguous_gradients", f"{ZERO}.reduce_scatter"):  # stage_1_and_2.py, _configure_moe_settings
        yield Rule(run.get(name, True) is False and layout.zero_stage < 3, name, "true with expert parallelism",
                   "DeepSpeed reduces the experts' gradients in no other way; remove the key")
    yield Rule(run.args.noise_scale_interval, "--noise_scale_interval", "a run without it",
               "the gradient of an expert is that of several ranks' micro-batches together; leave the flag out",
               found="expert parallelism")


def pipeline_partition(run: Plan) -> Iterator[Rule]:
    """Partitions whose pattern matches no layer, or with a stage without a block: its optimizer needs matrices."""
    method, stages = run.layout.partition_method, run.layout.pipeline_stages
    key = "pipeline.partition" if run.file.get("pipeline.partition") is not None else "pipeline.partition_method"
    pattern, layers = layer_pattern(method), layer_costs(run.model, run.layout.seq_length)
    names = list(dict.fromkeys(layer.class_name for layer in layers))
    yield Rule(pattern is not None and not any(map(pattern.search, names)), key,
               f"a regular expression that matches some of the layers: {', '.join(names)}",
               '"type:block" gives each pipeline stage the same number of blocks')
    if stages == 1:
        return
    bounds = stage_bounds(layers, num_stages=stages, method=method)
    empty = stage_without_block(layers, bounds)
    if empty is not None:
        own = [layer.class_name for layer in layers[bounds[empty]:bounds[empty + 1]]]
        yield Rule(True, key, problem=f'"{method}" leaves stage {empty + 1} of {stages} without a block: it would hold '
                   f"only {', '.join(own) or 'no layer'}",
                   remedy='"flops" and "time" give each stage a block; or use fewer "stages"')


def precision_of_device(run: Plan) -> Iterator[Rule]:
    """Precisions that the device does not have, and emulation that is not needed."""
    precision, device, emulated = run.layout.precision, run.device, run.args.emulate_fp16
    supported = f"a precision that this {device.kind} device supports"
    yield Rule(precision == "fp16" and not device.fp16 and not emulated, "fp16.enabled", supported,
               "use bf16, or give --emulate_fp16 (very slow, for tests)")
    yield Rule(precision == "bf16" and not device.bf16, "bf16.enabled", supported, "use fp16 or fp32")
    yield Rule(emulated and precision != "fp16", "--emulate_fp16", problem='it needs "fp16": {"enabled": true} in the '
               f"JSON, which selects {precision}", remedy="leave --emulate_fp16 out")


def zero_and_offload(run: Plan) -> Iterator[Rule]:
    """Keys of zero_optimization that need another ZeRO stage, other ranks or other matrices."""
    layout, model, keys = run.layout, run.model, run.get(ZERO, {})
    device, zero_stage = layout.offload_optimizer, layout.zero_stage
    yield Rule(device != "none" and zero_stage == 0, OFFLOAD_DEVICE, '"none" at ZeRO stage 0',
               "set zero_optimization.stage to 1 or more")
    yield Rule(device == "nvme" and zero_stage != 3, OFFLOAD_DEVICE, f'"none" or "cpu" at ZeRO stage {zero_stage}',
               "NVMe needs stage 3; at stages 1 and 2 DeepSpeed would silently use the CPU")
    for name in keys:
        other = name.removeprefix("stage3_")
        yield Rule(name != other and other in keys, f"{ZERO}.{name}", f'one of "{name}" and "{other}"', found="both")
    yield Rule(layout.hpz_partition_size > 1 and layout.world_size % layout.hpz_partition_size, _HPZ,
               f"a divisor of the {layout.world_size} ranks")
    yield Rule(layout.hpz_partition_size > 1 and layout.offload_param == "nvme", _HPZ, '1 with "offload_param" to NVMe',
               "DeepSpeed creates the secondary copy on the device of the parameters, and torch has no device nvme; "
               "remove the key")
    for name in _QUANTIZED:
        yield Rule(run.get(name) and run.device.kind == "cpu", name, "false on a CPU",
                   "DeepSpeed's quantization kernels need CUDA")
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    # runtime/zero/partition_parameters.py, CUDAQuantizer.quantize: it fails for other sizes
    for rows in (model.vocab_size, model.intermediate_size, qkv, model.num_heads * model.head_size):
        yield Rule(run.get(_QUANTIZED[0]) and -(-rows * model.hidden_size // layout.zero_size) % 8, _QUANTIZED[0],
                   problem=f"each of the {layout.zero_size} ranks has a part of a matrix of {rows} x "
                   f"{model.hidden_size}, and its elements are not a multiple of 8",
                   remedy="remove the key, or use another number of ranks; --model_overrides can pad the vocabulary to "
                          "a multiple of 128")
    yield Rule(zero_stage in (1, 2) and run.get(f"{ZERO}.allgather_bucket_size", 0) % 2,
               f"{ZERO}.allgather_bucket_size", "an even number")


def gradients_and_master_weights(run: Plan) -> Iterator[Rule]:
    """Types of accumulated gradients and master weights, and factors of the gradients."""
    layout, precision, zero_stage = run.layout, run.layout.precision, run.layout.zero_stage
    dtype, key = layout.grad_accum_dtype or precision, "data_types.grad_accum_dtype"
    yield Rule(dtype not in (precision, "fp32"), key, f'"{precision}", the model\'s precision, or "fp32"')
    yield Rule(dtype != precision and zero_stage == 0, key, f'"{precision}" at ZeRO stage 0',
               "DeepSpeed accumulates in another type from stage 1 on")
    yield Rule(run.get("data_types.param_dtype") not in (None, precision), "data_types.param_dtype",
               f'"{precision}", which bf16 and fp16 select', "remove the key")
    yield Rule(run.get("bf16.immediate_grad_update") and not layout.uses_bf16_optimizer, "bf16.immediate_grad_update",
               problem="the key has no effect in this run",
               remedy='it needs bf16 at ZeRO stage 0, or at stage 1 with "grad_accum_dtype": "fp32" and without '
                      "offload; remove the key")
    states_16bit = run.get("bf16.bf16_optimizer_states")
    on_cpu = layout.offload_optimizer != "none"
    for kind in ("fp16", "bf16"):
        key = f"{kind}.{kind}_master_weights_and_grads"
        yield Rule(run.get(key) and (precision != kind or zero_stage == 0), key,
                   problem=f"the key needs {kind} and ZeRO stage 1, 2 or 3")
        in_16bit = layout.optimizer in ("adam", "adamw") and not run.get("optimizer.params.torch_adam") if on_cpu else \
            kind == "bf16" and states_16bit
        yield Rule(run.get(key) and not in_16bit, key, problem="the key needs DeepSpeed's Adam on the CPU: "
                   f'{OFFLOAD_DEVICE} "cpu", without optimizer.params.torch_adam')
    yield Rule(states_16bit and not run.get("bf16.bf16_master_weights_and_grads"), "bf16.bf16_optimizer_states",
               problem='the key needs "bf16_master_weights_and_grads": true')
    for name, is_set in (("prescale_gradients", run.get("prescale_gradients")),
                         ("gradient_predivide_factor", run.get("gradient_predivide_factor", 1.0) != 1.0)):
        yield Rule(is_set and zero_stage >= 2, name, problem=f"the key has no effect at ZeRO stage {zero_stage}",
                   remedy="DeepSpeed reads it at stages 0 and 1; remove the key")


def loss_scale(run: Plan) -> Iterator[Rule]:
    """Limits of fp16's dynamic loss scale."""
    if run.layout.precision != "fp16" or run.get("fp16.loss_scale", 0) != 0:
        return
    initial = 2 ** run.get("fp16.initial_scale_power", 16)
    yield Rule(not 1 <= run.get("fp16.min_loss_scale", 1) <= initial, "fp16.min_loss_scale",
               f"1 to {initial}, the initial scale (2 to the power of initial_scale_power)")
    yield Rule(run.get("fp16.loss_scale_window", 1000) < 1, "fp16.loss_scale_window",
               "at least 1 with dynamic loss scaling")


def nvme_here(run: Plan) -> Iterator[Rule]:
    """The library and the DeepSpeed that NVMe offload needs on this machine."""
    on_nvme = "nvme" in (run.layout.offload_optimizer, run.layout.offload_param)
    yield Rule(on_nvme and not is_at_least(NVME_SINCE), f"deepspeed {deepspeed_version()}",
               problem=f"offload to NVMe needs DeepSpeed {NVME_SINCE} or later",
               remedy=INSTALL)
    yield Rule(on_nvme and find_library("aio") is None,
               "libaio", problem="DeepSpeed's NVMe offload needs this library, which is not installed",
               remedy="apt-get install libaio-dev")


def operators_without_nvcc(run: Plan) -> Iterator[Rule]:
    """Settings that need a compiled CUDA operator, on a GPU without a fitting nvcc. Adam has a substitute."""
    if run.device.kind != "cuda" or run.device.compiles:
        return
    remedy = "install the CUDA toolkit of the version that torch was built for, and set CUDA_HOME"
    reason = why_not_nvcc() or "there is no nvcc of torch's CUDA version with all of CUDA's headers"
    problem = f"it is a CUDA operator that DeepSpeed compiles, and {reason}"
    is_compiled = OPTIMIZERS[run.layout.optimizer].is_compiled
    yield Rule(is_compiled and run.layout.offload_optimizer == "none", "optimizer.type", problem=problem,
               remedy=f"use AdamW, or {remedy}")
    for name in _QUANTIZED:
        yield Rule(run.get(name), name, problem=problem, remedy=f"set it to false, or {remedy}")
    for name in (OFFLOAD_DEVICE, f"{ZERO}.offload_param.device"):
        yield Rule(run.get(name) == "nvme", name, problem=problem, remedy=f'use "cpu", or {remedy}')


def nvme_buffer_size(run: Plan) -> Iterator[Rule]:
    """A buffer below a rank's part of the largest matrix: an assertion of DeepSpeed would fail in the first step."""
    model, key = run.model, f"{ZERO}.offload_param.buffer_size"
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    largest = max(model.vocab_size, model.max_positions, model.intermediate_size, qkv) * model.hidden_size
    needed = -(-largest // run.layout.world_size)
    yield Rule(run.layout.offload_param == "nvme" and run.layout.offload_param_buffer_size < needed, key,
               f"at least {needed}, a rank's part of the largest matrix", found=run.get(key, "100000000, the default"))


def sequence_parallelism(run: Plan) -> Iterator[Rule]:
    """Types for the reduction of gradients that DeepSpeed would not use, and the gradient noise scale."""
    layout, size, own = run.layout, run.layout.sequence_parallel_size, "seq_parallel_communication_data_type"
    if size == 1:
        return
    yield Rule(layout.precision == "fp16" and layout.zero_stage == 0, f"{ZERO}.stage",
               "1, 2 or 3 with fp16 and sequence parallelism",
               "DeepSpeed does not scale the loss at stage 0; or use bf16", found=0)
    yield Rule(run.get("communication_data_type") is not None, "communication_data_type",
               problem=f'DeepSpeed ignores it with "{SEQUENCE}"', remedy=f'write "{own}" instead')
    sums_in_fp32 = layout.zero_stage in (1, 2) and layout.reduce_scatter
    yield Rule(sums_in_fp32 and run.get(own, "fp32") not in (None, "fp32"), own,
               f"fp32 at ZeRO stage {layout.zero_stage}",
               "DeepSpeed always sums gradients of shards of sequences in fp32 there; remove the key")
    yield Rule(run.args.noise_scale_interval, "--noise_scale_interval", "1",
               "a rank has only the gradient of its shard of each micro-batch", found=f'"{SEQUENCE}": {size}')
