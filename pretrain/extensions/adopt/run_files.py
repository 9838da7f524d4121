"""The files with which an adopted run continues: run.yaml and ds_config.json, with the settings that are known."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pretrain.config.ds_json.check_keys import check_json_keys
from pretrain.config.ds_json.optimizers import OPTIMIZERS, SCHEDULERS
from pretrain.config.ds_json.read import DsFile
from pretrain.config.ds_json.schema import MONITORS
from pretrain.config.write_yaml import comment_line, yaml_entry
from pretrain.errors import ConfigError, printable, shorten
from pretrain.extensions.adopt.foreign_run import ForeignRun
from pretrain.extensions.adopt.optimizers import WeightDecay

RUN_YAML, DS_JSON = "run.yaml", "ds_config.json"
_KINDS = ("linear", "cosine", "constant")  # schedules of ForeignRun.schedule that have these names in --lr_schedule
_WITHOUT_DECAY = ("constant",)
# keys of the JSON that depend on the number of ranks, or that `ds_config_of` writes itself
_OWN_KEYS = ("train_batch_size", "gradient_accumulation_steps", "optimizer", "scheduler", "bf16", "bfloat16", "fp16")
# Keys that describe the training, and name no file, host or account. A checkpoint of a stranger chooses nothing else.
_TAKEN_OVER = (
    "train_micro_batch_size_per_gpu", "gradient_clipping", "data_types", "zero_optimization",
    "zero_allow_untested_optimizer", "pipeline", "activation_checkpointing", "communication_data_type",
    "seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor", "compile",
    "tensor_parallel", "expert_parallel", "sequence_parallel_size")
# Keys that ask for reports, or describe the machine: they name files, programs and accounts
_LEFT_TO_THE_USER = (
    *MONITORS, "flops_profiler", "comms_logger", "comms_config", "monitor_config", "steps_per_print", "timers",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "aio", "checkpoint", "disable_python_gc")
_REPORTS = "reports, files and accounts are yours to choose"
_NVME = "a disk of another machine"
_REJECTED = "not a key or value of this program"
_OFFLOADS = ("offload_optimizer", "offload_param")


def adopted_flags(run: ForeignRun) -> dict[str, Any]:
    """Return the flags of the run that the source records, apart from weight decay."""
    return {name: value for name, value in {"seq_length": run.seq_length, "seed": run.seed, **run.flags,
                                            **_schedule_flags(run.schedule)}.items() if value is not None}


def missing_flags(run: ForeignRun) -> list[str]:
    """Return the flags without which the run has no data or length, or a default where the source has another value."""
    flags = adopted_flags(run)
    if "scheduler" in ds_config_of(run)[0]:
        flags["lr_schedule"] = None
    return ["train_data", *(name for name in ("seq_length", "train_steps", "lr_schedule") if name not in flags)]


def _schedule_flags(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of length and schedule. Without the values that a schedule needs, it is not described."""
    kind, total = schedule.get("type"), schedule.get("total_steps")
    flags: dict[str, Any] = {"train_steps": total, **schedule.get("flags", {})}
    if "flags" in schedule or kind not in _KINDS or (kind not in _WITHOUT_DECAY and total is None) or \
            "warmup_steps" not in schedule or schedule.get("params"):
        return flags
    flags |= {"lr_schedule": kind, "lr_warmup_steps": schedule["warmup_steps"]}
    if schedule.get("first_rate_is_0"):
        flags["lr_counts_from_0"] = True
    if kind in _WITHOUT_DECAY:
        return flags
    lowest = "min_lr" if "min_lr" in schedule else "min_lr_ratio"
    return {**flags, "lr_decay_steps": total, lowest: schedule.get(lowest, 0.0)}


def optimizer_of(run: ForeignRun) -> dict[str, Any]:
    """Return the "optimizer" block of a DeepSpeed JSON; {}: it is not recorded.

    Its "lr" is that of the source's JSON, if it has one: a scheduler of DeepSpeed changes the rate in the checkpoint.
    """
    if not run.optimizer:
        return {}
    given = (((run.ds_config or {}).get("optimizer") or {}).get("params") or {}).get("lr")
    rate = {"lr": given} if isinstance(given, (int, float)) else {}
    return {"type": run.optimizer["type"], "params": {**(run.optimizer.get("params") or {}), **rate}}


def ds_config_of(run: ForeignRun) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the DeepSpeed JSON with which the run continues, and why some keys of the source's are not in it."""
    given = run.ds_config or {}
    described, left_out = _described(given)
    kept, rejected = _legal(described)
    left_out |= dict.fromkeys(rejected, _REJECTED)
    own: dict[str, Any] = {} if run.global_batch_size is None else {"train_batch_size": run.global_batch_size}
    own |= {"bf16": {"enabled": run.precision == "bf16"}}
    own["fp16"] = _legal({"fp16": given.get("fp16", {})})[0].get("fp16", {}) if run.precision == "fp16" else {}
    own["fp16"] |= {"enabled": run.precision == "fp16"}
    block = optimizer_of(run)
    if str(block.get("type", "")).lower() in OPTIMIZERS:
        own["optimizer"] = {**_legal({"optimizer": block})[0].get("optimizer", {}), "type": block["type"]}
    if isinstance(scheduler := given.get("scheduler"), dict) and scheduler.get("type") in SCHEDULERS:
        legal, rejected = _legal({"scheduler": scheduler})
        own["scheduler"] = {**legal.get("scheduler", {}), "type": scheduler["type"]}
        left_out |= dict.fromkeys(rejected, _REJECTED)
    return {"zero_optimization": {"stage": _zero_stage(str(block.get("type", "")))}, **kept, **own}, {
        printable(shorten(key)): reason for key, reason in left_out.items()}


def _zero_stage(optimizer: str) -> int:
    """Return the ZeRO stage for a run of another engine: 1, which changes no result, where the optimizer allows it."""
    row = OPTIMIZERS.get(optimizer.lower())
    return 1 if row is None or (row.tested_with_zero and row.name != "Adagrad") else 0


def _described(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of the source's JSON that describe the training, and why the others are left out."""
    kept = {name: value for name, value in given.items() if name in _TAKEN_OVER}
    left_out = {name: _REPORTS if name in _LEFT_TO_THE_USER else _REJECTED for name in given
                if name not in (*_TAKEN_OVER, *_OWN_KEYS)}
    zero: dict[str, Any] = dict(kept.get("zero_optimization") or {})
    for name in _OFFLOADS:
        if not isinstance(block := zero.get(name), dict):
            continue
        is_nvme = block.get("device") == "nvme"
        if is_nvme or "nvme_path" in block:
            left_out[f"zero_optimization.{name}" + ("" if is_nvme else ".nvme_path")] = _NVME
        others = None if is_nvme else {key: value for key, value in block.items() if key != "nvme_path"}
        zero[name] = others
    return {**kept, **({"zero_optimization": zero} if zero else {})}, left_out


def _legal(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a JSON that this program accepts, and the dotted keys of the rest."""
    kept: dict[str, Any] = {}
    left_out = []
    for keys, value in _leaves(values):
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        if keys[0] in ("optimizer", "scheduler"):
            nested[keys[0]] = {"type": values[keys[0]]["type"], **nested[keys[0]]}
        try:
            accepted, _ = check_json_keys(DsFile("", nested))
        except ConfigError:
            left_out.append(".".join(keys))
            continue
        _merge(kept, accepted)
    return kept, left_out


def _leaves(values: dict[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the value of everything in nested objects that is not an object itself."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*keys, str(name)))
        else:
            yield (*keys, str(name)), value


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def run_files(run: ForeignRun, decay: WeightDecay, out: Path) -> dict[str, str]:
    """Return name -> text of the files of the run folder `out`."""
    values = {"deepspeed_config": str(out / DS_JSON), "save": str(out), **adopted_flags(run), **decay.flags}
    head = [f"This run continues {run.folder.absolute()} ({run.program}) after step {run.step}.",
            f"Add {', '.join(missing_flags(run))}. Settings that are not listed were not recorded."]
    entries = [yaml_entry(key, value) for key, value in values.items()]
    return {RUN_YAML: "".join([*map(comment_line, head), *entries]),
            DS_JSON: json.dumps(ds_config_of(run)[0], indent=2) + "\n"}
