"""A DeepSpeed JSON read, judged and completed: the one place that says what a run's engine is given."""

import re
from dataclasses import dataclass
from typing import Any

from pretrain.config.arguments import RunArguments
from pretrain.config.auto import (
    fill_batch,
    fill_model_sizes,
    fill_nvme_path,
    fill_optimizer,
    fill_precision,
    fill_reports,
    fill_scheduler,
    with_optimizer,
)
from pretrain.config.ds_json.clean import Idle, clean, drop_idle
from pretrain.config.ds_json.keys import check_keys
from pretrain.config.ds_json.read import DsFile, get_value, read_ds_config
from pretrain.config.ds_json.schema import DEFAULT_PARTITION_METHOD, PARTITION_METHODS
from pretrain.config.schedule import run_steps
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig

__all__ = ["DsFile", "DsSettings", "complete_ds_config", "read_ds_config"]


@dataclass(frozen=True)
class DsSettings:
    """What a DeepSpeed JSON asks for, complete."""

    file: DsFile
    config: dict[str, Any]  # as handed to deepspeed.initialize
    args: RunArguments
    model: ModelConfig
    device: Device
    world_size: int  # ranks
    zero_stage: int
    pipeline_stages: int
    data_parallel_size: int  # ranks / pipeline stages
    micro_batch_size: int  # samples
    gradient_accumulation_steps: int
    global_batch_size: int  # samples
    precision: str  # fp32, bf16, fp16
    optimizer: str  # lower case
    train_steps: int
    peak_lr: float | None  # None: the JSON has its own scheduler
    activation_checkpoint_interval: int  # blocks; 0: off
    partition_method: str
    idle: tuple[Idle, ...]  # keys of the file that have no effect, and why

    def get(self, dotted: str, default: Any = None) -> Any:
        """A value of the complete configuration."""
        return get_value(self.config, dotted, default)

    def zero(self, name: str, default: Any = None) -> Any:
        """A value of its zero_optimization block, under either spelling."""
        return self.get(f"zero_optimization.stage3_{name}", self.get(f"zero_optimization.{name}", default))

    def offload(self, what: str) -> str:
        """Where "optimizer" or "param" lies: none, cpu or nvme."""
        return str(self.get(f"zero_optimization.offload_{what}.device", "none"))

    @property
    def grad_accum_dtype(self) -> str | None:
        """data_types.grad_accum_dtype; None: the same as `precision`."""
        return self.get("data_types.grad_accum_dtype")

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed picks its BF16_Optimizer (runtime/engine.py, _do_optimizer_sanity_check)."""
        if self.precision != "bf16":
            return False
        accumulates_fp32 = self.grad_accum_dtype == "fp32" and self.offload("optimizer") == "none"
        return self.zero_stage == 0 or (self.zero_stage == 1 and accumulates_fp32)

    def refuse(self, dotted: str, expected: str, remedy: str = "", found: Any = None) -> ConfigError:
        """The error of one key, with the value that it has."""
        if found is None:
            value = self.get(dotted)
            found = f'"{value}"' if isinstance(value, str) else str(value).lower() if value in (True, False) else value
        return ConfigError(self.file.where(dotted), found=found, expected=expected, remedy=remedy)


def complete_ds_config(file: DsFile, args: RunArguments, *, model: ModelConfig, world_size: int,
                       device: Device) -> DsSettings:
    """Check every key by itself, fill every "auto", and do the batch arithmetic. Raises ConfigError.

    What may be combined is judged afterwards, by `pretrain.config.rules.check_rules`.
    """
    check_keys(file)
    with_own = with_optimizer(file, args)
    config, idle = clean(with_own.values)
    config["optimizer"].setdefault("params", {})
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    idle += drop_idle(config, stage)
    pipeline_stages = _pipeline_stages(file, stage, world_size, model)
    method, interval = _resolve_pipeline(file, config)
    precision = fill_precision(file, config, args)
    data_parallel_size = world_size // pipeline_stages
    micro, accumulation, total = fill_batch(file, config, args, data_parallel_size)
    train_steps = run_steps(args, total)
    rate = fill_optimizer(with_own, config, args)
    if not device.compiles and config["optimizer"]["type"].lower() in ("adam", "adamw") and \
            get_value(config, "zero_optimization.offload_optimizer.device", "none") == "none":
        config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own would be compiled with nvcc
    fill_model_sizes(config, model)
    fill_scheduler(file, config, args, train_steps, rate)
    fill_nvme_path(file, config, args)
    fill_reports(config, args, stage)
    return DsSettings(
        file=file, config=config, args=args, model=model, device=device, world_size=world_size, zero_stage=stage,
        pipeline_stages=pipeline_stages, data_parallel_size=data_parallel_size, micro_batch_size=micro,
        gradient_accumulation_steps=accumulation, global_batch_size=total, precision=precision,
        optimizer=config["optimizer"]["type"].lower(), train_steps=train_steps,
        peak_lr=None if "scheduler" in config else rate, activation_checkpoint_interval=interval,
        partition_method=method, idle=tuple(idle))


def _pipeline_stages(file: DsFile, zero_stage: int, world_size: int, model: ModelConfig) -> int:
    """pipeline.stages, which must suit ZeRO, the ranks and the model."""
    stages = int(file.get("pipeline.stages", 1))
    where = file.where("pipeline.stages")
    if stages > 1 and zero_stage >= 2:
        raise ConfigError(where, found=f"{stages} with zero_optimization.stage {zero_stage}", expected="1",
                          remedy="DeepSpeed's pipelines work with ZeRO stage 0 or 1")
    if stages > model.num_layers:
        raise ConfigError(where, found=stages, expected=f"at most {model.num_layers}, the model's layers")
    if world_size % stages:
        raise ConfigError(where, found=f"{stages} stages on {world_size} ranks",
                          expected="a number that divides the ranks", remedy=f"launch {_multiples(stages)} ranks")
    return stages


def _multiples(stages: int) -> str:
    return f"{stages}, {2 * stages} or {3 * stages}"


def _resolve_pipeline(file: DsFile, config: dict[str, Any]) -> tuple[str, int]:
    """The "pipeline" block with every key set; returns (partition_method, activation_checkpoint_interval)."""
    own = config.get("pipeline", {})
    given = [name for name in ("partition", "partition_method") if name in own]
    if len(given) == 2:
        raise ConfigError(file.where("pipeline.partition"), found='beside "partition_method"',
                          expected="one of the two")
    method = own[given[0]] if given else DEFAULT_PARTITION_METHOD
    if method.lower() in PARTITION_METHODS:
        method = PARTITION_METHODS[method.lower()]
    elif not _splits_blocks(method):
        raise ConfigError(file.where(f"pipeline.{given[0]}"), found=f'"{method}"', expected=
                          '"flops", "parameters", "uniform" or "type:block" (as many blocks on each stage)')
    interval = int(own.get("activation_checkpoint_interval", 0))
    config["pipeline"] = {"stages": int(own.get("stages", 1)), "partition_method": method,
                          "activation_checkpoint_interval": interval, "use_reentrant": False}
    return method, interval


def _splits_blocks(method: str) -> bool:
    """Whether "type:REGEX" finds the models' blocks, whose class is Block; read as DeepSpeed reads it."""
    kind, _, pattern = method.lower().partition(":")
    try:
        return kind == "type" and re.search(pattern.split(":")[0], "Block", re.IGNORECASE) is not None
    except re.error:
        return False
