"""Make the plan of a run: validate each key of the DeepSpeed JSON, fill missing and "auto" values, parse the layout."""

import copy
import math
from dataclasses import fields, replace
from typing import Any

from pretrain.active_extensions import model_extensions
from pretrain.config.auto_values import (
    check_contradictions,
    fill_batch,
    fill_model_sizes,
    fill_nvme_path,
    fill_optimizer,
    fill_precision,
    fill_reports,
    fill_scheduler,
    scale_rates,
    with_optimizer,
)
from pretrain.config.ds_json.check_keys import IgnoredKey, check_json_keys, compiles_blocks, requests_nothing
from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import DEFAULT_PARTITION_METHOD, PARTITION_METHODS, ZERO
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout import Layout, parse_layout
from pretrain.config.make_schedule import make_schedule
from pretrain.config.plan import Plan, RunLength, run_length
from pretrain.config.schedule import Schedule
from pretrain.data.token_schedules import parse_seq_lengths
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError, counted
from pretrain.model.config import ModelConfig
from pretrain.model.partition import METHODS, layer_pattern

TENSOR = "tensor_parallel.autotp_size"
SEQUENCE = "sequence_parallel_size"
EXPERT = "expert_parallel.autoep_size"
_STAGE_12_KEYS = ("round_robin_gradients", "parameter_alignment")
_STAGE_3_KEYS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "sub_group_size",
                 "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
                 "save_muon_momentum_buffer_in_memory")
_NVME_KEYS = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
_SEQUENCE_DTYPE = "seq_parallel_communication_data_type"


def resolve_ds_config(file: DsFile, args: RunArguments, *, model: ModelConfig, world_size: int,
                      device: Device) -> Plan:
    """Validate each key by itself, fill every "auto" and every batch size, and parse the layout. Raises ConfigError.

    `run_rules.check_rules` validates combinations of keys afterwards. The plan has no data.
    """
    config, ignored = check_json_keys(file)
    check_contradictions(file, args)
    args = replace(args, compile_blocks=args.compile_blocks or compiles_blocks(file.values))
    completed = with_optimizer(file, args)
    config.setdefault("optimizer", copy.deepcopy(completed.values["optimizer"]))
    config["optimizer"].setdefault("params", {})
    zero_stage = int(get_value(config, "zero_optimization.stage", 0))
    ignored += _drop_ignored_keys(config, zero_stage)
    replica_ranks = ranks_per_replica(file, zero_stage=zero_stage, world_size=world_size, model=model)
    _resolve_pipeline(file, config)
    ignored += _drop_unused_offload(config, args)
    fill_precision(file, config, args)
    batch_sizes = fill_batch(file, config, args, world_size // replica_ranks)
    length = run_length(args.train_steps, args.train_tokens, batch_sizes=batch_sizes, seq_length=args.seq_length,
                        first_sample=args.first_sample)
    rate = scale_rates(config, fill_optimizer(completed, config, args), args)
    _select_optimizer_class(config, zero_stage, device)
    fill_model_sizes(config, model, zero_stage)
    fill_scheduler(file, config, args, length.train_steps, rate)
    fill_nvme_path(file, config, args)
    fill_reports(config, args, zero_stage)
    layout = parse_layout(config, world_size=world_size, seq_length=args.seq_length, device_kind=device.kind,
                          document_attention=args.document_attention, recompute=args.recompute or "none",
                          recompute_every=args.recompute_every, mlp_tiles=args.mlp_tiles,
                          model_extensions=tuple(model_extensions(args)), plain_operators=args.plain_operators,
                          compile_blocks=args.compile_blocks)
    schedule = _schedule(file, config, args, length)
    return Plan(args=args, file=file, ds_config=config, model=model, device=device, layout=layout, length=length,
                seq_lengths=parse_seq_lengths(args.seq_length_schedule, seq_length=args.seq_length),
                schedule=schedule, schedule_flags=_schedule_flags(file, args, schedule),
                notes=_notes(file, config, args, layout, device, length.train_steps, ignored))


def _select_optimizer_class(config: dict[str, Any], zero_stage: int, device: Device) -> None:
    """Set the keys by which DeepSpeed selects a class that works here, and accepts it with ZeRO."""
    kind, params = config["optimizer"]["type"].lower(), config["optimizer"]["params"]
    offload = get_value(config, "zero_optimization.offload_optimizer.device", "none")
    if not device.compiles and kind in ("adam", "adamw", "muon") and offload == "none":
        params["torch_adam"] = True  # DeepSpeed's FusedAdam must be compiled with nvcc
        if kind != "muon" and params.get("foreach") is None:
            params["fused"] = True  # one kernel for all operations, and no temporary memory
    row = OPTIMIZERS[kind]
    if zero_stage > 0 and row.elementwise and not row.tested_with_zero:
        config["zero_allow_untested_optimizer"] = True  # otherwise DeepSpeed rejects them with ZeRO


def _schedule(file: DsFile, config: dict[str, Any], args: RunArguments, length: RunLength) -> Schedule | None:
    """Return the schedule of the --lr_* flags, or None if the JSON has its own scheduler."""
    if "scheduler" in config:
        return None
    peak = float(config["optimizer"]["params"]["lr"])
    if peak <= 0:
        raise ConfigError(file.where("optimizer.params.lr"), found=f"{peak:g}", expected="a rate above 0")
    return make_schedule(args, peak=peak, length=length)


def _schedule_flags(file: DsFile, args: RunArguments, schedule: Schedule | None) -> dict[str, Any]:
    """Return what the user asked for: the --lr_* flags, or the parameters of the JSON's scheduler that are given."""
    if schedule is None:
        given = file.get("scheduler.params", {})
        return {name: value for name, value in given.items() if value != "auto"}
    names = (f.name for f in fields(RunArguments) if "lr" in f.name.split("_"))
    return {name: value for name in names if (value := getattr(args, name)) not in (None, False)}


def _resolve_pipeline(file: DsFile, config: dict[str, Any]) -> None:
    """Set every key of the "pipeline" block."""
    own = config.get("pipeline", {})
    given = [name for name in ("partition", "partition_method") if name in own]
    if len(given) == 2:
        raise ConfigError(file.where("pipeline.partition"), problem='"partition_method" is set too',
                          remedy="both are names of the same setting; remove one of them")
    method = own[given[0]] if given else DEFAULT_PARTITION_METHOD
    if method.lower() in PARTITION_METHODS:
        method = PARTITION_METHODS[method.lower()]
    elif layer_pattern(method) is None:
        raise ConfigError(file.where(f"pipeline.{given[0]}"), found=f'"{method}"', expected=METHODS,
                          remedy='"type:block" gives each pipeline stage the same number of blocks')
    interval = int(own.get("activation_checkpoint_interval", 0))
    config["pipeline"] = {"stages": int(own.get("stages", 1)), "partition_method": method,
                          "activation_checkpoint_interval": interval, "use_reentrant": False}


def _drop_ignored_keys(config: dict[str, Any], zero_stage: int) -> list[IgnoredKey]:
    """Remove keys without an effect at this ZeRO stage, without NVMe or sequence parallelism, in place.

    Returns the removed keys that request something, each with a reason.
    """
    ignored: list[IgnoredKey] = []
    zero = config.get("zero_optimization", {})
    for name in list(zero):
        if (_is_for_stage_3(name) and zero_stage != 3) or (name in _STAGE_12_KEYS and zero_stage not in (1, 2)):
            value = zero.pop(name)
            if name == "offload_param" and value.get("device", "none") == "none":
                continue
            if not requests_nothing(value) and not (name == "zero_hpz_partition_size" and value <= 1):
                ignored.append((f"zero_optimization.{name}", f"no effect at ZeRO stage {zero_stage}"))
    if zero_stage < 2 and zero.get("overlap_comm"):
        zero["overlap_comm"] = False  # DeepSpeed does so itself for a PipelineModule
        ignored.append(("zero_optimization.overlap_comm", f"no effect at ZeRO stage {zero_stage}"))
    devices = {block: (zero.get(block) or {}).get("device", "none") for block in _NVME_KEYS}
    for block, names in _NVME_KEYS.items():
        for name in names if devices[block] == "cpu" else ():
            if zero[block].pop(name, None) not in (None, False, "auto"):
                ignored.append((f"zero_optimization.{block}.{name}", 'no effect with "device": "cpu"'))
    if "nvme" not in devices.values() and config.pop("aio", None) is not None:
        ignored.append(("aio", 'no effect without "device": "nvme"'))
    if config.get("sequence_parallel_size", 1) == 1 and config.pop(_SEQUENCE_DTYPE, None) is not None:
        ignored.append((_SEQUENCE_DTYPE, 'no effect without "sequence_parallel_size"'))
    if config.get("steps_per_print") in ("auto", math.inf):
        del config["steps_per_print"]
    return ignored


def _is_for_stage_3(name: str) -> bool:
    return name.startswith("stage3_") or f"stage3_{name}" in ZERO or name in (*_STAGE_3_KEYS, "offload_param")


def _drop_unused_offload(config: dict[str, Any], args: RunArguments) -> list[IgnoredKey]:
    """Remove activation_checkpointing.cpu_checkpointing if nothing is recomputed, and say so: it turns nothing on."""
    recomputes = config["pipeline"]["activation_checkpoint_interval"] > 0 or args.recompute not in (None, "none")
    block = config.get("activation_checkpointing", {})
    if recomputes or not block.pop("cpu_checkpointing", False):
        return []
    return [("activation_checkpointing.cpu_checkpointing", "no effect without recomputation: --recompute blocks, or "
             '"pipeline": {"activation_checkpoint_interval": 1}')]


def ranks_per_replica(file: DsFile, *, zero_stage: int, world_size: int, model: ModelConfig) -> int:
    """Return the ranks that process the same samples: pipeline stages x tensor-parallel x sequence-parallel ranks.

    Raises ConfigError for a degree that fits neither the ranks nor the ZeRO stage nor the model.
    """
    stages = ranks = _pipeline_stages(file, zero_stage, world_size, model)
    _check_other_names(file)
    for key in (TENSOR, SEQUENCE):
        degree = max(1, int(file.get(key, 1) or 1))
        if world_size % (ranks * degree):
            raise ConfigError(file.where(key), found=f"{degree}, with {_ranks(world_size // ranks)} to share",
                              expected="a number that divides these ranks",
                              remedy=f"launch {ranks * degree} or {2 * ranks * degree} ranks")
        ranks *= degree
    _check_expert_degree(file, world_size // stages)
    return ranks


def _ranks(number: int) -> str:
    """Return a number of ranks: "1 rank", "2 ranks"."""
    return f"{number} rank" + ("" if number == 1 else "s")


def _check_other_names(file: DsFile) -> None:
    """Reject a tensor-parallel degree that DeepSpeed would not use: only autotp_size turns it on."""
    degree = max(1, int(file.get(TENSOR, 1) or 1))
    for name in ("tensor_parallel", "tp"):
        key = f"tensor_parallel.{name}.tp_size"
        if file.get(key, 1) not in (1, degree):
            raise ConfigError(file.where(key), found=file.get(key), expected=f'{degree}, the "autotp_size"',
                              remedy='write the degree as "tensor_parallel": {"autotp_size": N}, and remove the key')


def _check_expert_degree(file: DsFile, ranks: int) -> None:
    """Raise ConfigError unless the block is turned on, and the degree divides the ranks of a pipeline stage."""
    degree = int(file.get(EXPERT, 1) or 1)
    if degree > 1 and file.get("expert_parallel.enabled") is None:
        raise ConfigError(file.where(EXPERT), found=degree, expected='also "enabled": true in the block',
                          remedy="without it, DeepSpeed ignores the degree")
    if file.get("expert_parallel.enabled") and ranks % degree:
        raise ConfigError(file.where(EXPERT), expected="a number that divides these ranks",
                          found=f"{degree}, with {_ranks(ranks)} to share the experts")


def _pipeline_stages(file: DsFile, zero_stage: int, world_size: int, model: ModelConfig) -> int:
    """Return pipeline.stages. Raises ConfigError unless it fits the ZeRO stage, the ranks and the model."""
    stages = int(file.get("pipeline.stages", 1))
    where = file.where("pipeline.stages")
    if stages > 1 and zero_stage >= 2:
        raise ConfigError(where, found=f"{stages} with zero_optimization.stage {zero_stage}", expected="1",
                          remedy="DeepSpeed's pipelines work with ZeRO stage 0 or 1")
    if stages > model.num_layers:
        raise ConfigError(where, found=stages, expected=f"at most {model.num_layers}, the model's layers")
    if world_size % stages:
        raise ConfigError(where, found=f"{stages} stages on {counted(world_size, 'rank')}",
                          expected="a number that divides the ranks",
                          remedy=f"launch {stages}, {2 * stages} or {3 * stages} ranks")
    return stages


def _notes(file: DsFile, config: dict[str, Any], args: RunArguments, layout: Layout, device: Device,
           train_steps: int, ignored: list[IgnoredKey]) -> tuple[str, ...]:
    """Return notes about the JSON: keys without an effect, and a missing optimizer."""
    notes = _ignored_key_notes(ignored)
    if "optimizer" not in file.values:
        params = ", ".join(f"{name} {value}" for name, value in config["optimizer"]["params"].items()
                           if name not in ("torch_adam", "fused"))
        notes.append(f'the JSON has no "optimizer": AdamW with {params}, from the flags and their defaults')
    if layout.pipeline_stages == 1 and layout.partition_method != DEFAULT_PARTITION_METHOD:
        notes.append("pipeline.partition_method: no effect with one stage")
    if layout.recomputation.offload and device.kind == "cpu":
        notes.append("activation_checkpointing.cpu_checkpointing: no use on a CPU, whose memory is the host's")
    if layout.zero_stage == 1 and layout.reduce_scatter and not layout.uses_bf16_optimizer:
        # runtime/zero/stage_1_and_2.py, average_tensor
        notes += [f'{name}: no effect at ZeRO stage 1 with "reduce_scatter"' for name in
                  ("prescale_gradients", "gradient_predivide_factor")
                  if config.get(name, 1.0) is True or config.get(name, 1.0) not in (0, 1)]
    interval = file.get("steps_per_print")
    if isinstance(interval, (int, float)) and interval <= train_steps:
        if layout.uses_pipeline_module:  # DeepSpeed's PipelineEngine prints at every log level
            notes.append("steps_per_print: DeepSpeed prints lines of its own between those of the run")
        elif args.deepspeed_log_level not in ("debug", "info") and not config.get("wall_clock_breakdown"):
            notes.append("steps_per_print: no effect without --deepspeed_log_level info")
    return tuple(notes)


def _ignored_key_notes(ignored: list[IgnoredKey]) -> list[str]:
    """Return a line for each reason and block: `sub_group_size, offload_param (zero_optimization): no effect ...`."""
    groups: dict[tuple[str, str], list[str]] = {}
    blocks = {dotted for dotted, _ in ignored}
    for dotted, reason in ignored:
        parent, _, name = dotted.rpartition(".")
        if parent in blocks:
            continue
        groups.setdefault((parent, reason), []).append(name)
    lines = []
    for (parent, reason), names in groups.items():
        subject = ", ".join(names) + (f" ({parent})" if parent else "") if len(names) > 1 else \
            f"{parent}.{names[0]}".lstrip(".")
        lines.append(f"{subject}: {reason}")
    return lines
