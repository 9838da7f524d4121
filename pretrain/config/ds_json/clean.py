"""Remove the keys of a DeepSpeed JSON that have no effect, with a note for each; spell the others as DeepSpeed does."""

import math
from typing import Any

from pretrain.config.ds_json.optimizers import SCHEDULERS, optimizer_params
from pretrain.config.ds_json.schema import BLOCKS_WITH_DEFAULTS, OLD_OFFLOAD, REMOVED, TREE, ZERO, Key, Tree

Idle = tuple[str, str]  # a dotted key, and why it has no effect

_COMMENTS = ("comment", "comments", "description", "note", "notes")
_STAGE_12_KEYS = ("round_robin_gradients", "parameter_alignment")
_STAGE_3_KEYS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "sub_group_size",
                 "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
                 "save_muon_momentum_buffer_in_memory")
_NVME_KEYS = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}


def is_comment(name: str) -> bool:
    """Whether a key is for human readers: "_comment", "//", "$schema", or a key that was disabled with "_"."""
    return name[:1] in ("_", "#", "$") or name.startswith("//") or name.lower() in _COMMENTS


def is_idle(value: Any, key: Key | None = None) -> bool:
    """Whether a value requests nothing, as in blocks copied from elsewhere: {"enabled": false}."""
    if value is None or value is False or value == {}:
        return True
    if key is not None and any(value == idle and isinstance(value, bool) == isinstance(idle, bool)
                               for idle in key.idle):
        return True
    return isinstance(value, dict) and value.get("enabled") is False


def takes_default(dotted: str) -> bool:
    """Whether DeepSpeed reads "auto" as the key's default (runtime/config_utils.py). A ZeRO stage must be a number."""
    block, _, rest = dotted.partition(".")
    return block in BLOCKS_WITH_DEFAULTS and rest not in ("", "stage")


def clean(values: dict[str, Any]) -> tuple[dict[str, Any], list[Idle]]:
    """A copy in DeepSpeed's own spelling without the keys that never have an effect here; and those of them that
    request something, to be noted.
    """
    idle: list[Idle] = []
    config = _clean(values, TREE, "", idle)
    idle += [(f"zero_optimization.{old}", f'read as "{new}": {{"device": "cpu"}}') for old, new in
             rename_old_keys(config)]
    return config, idle


def rename_old_keys(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Write keys of earlier DeepSpeed versions in the current spelling. Returns (old, new) of the offload keys."""
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
        config.pop("bfloat16", None)
    zero = config.get("zero_optimization")
    renamed = []
    for old, new in OLD_OFFLOAD.items():
        if isinstance(zero, dict) and zero.pop(old, None):
            zero[new] = {"device": "cpu", **(zero.get(new) or {})}
            renamed.append((old, new))
    return renamed


def _clean(values: dict[str, Any], tree: Tree, prefix: str, idle: list[Idle]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        dotted, key = prefix + name, tree.get(name)
        if key is None and is_comment(name):
            idle.append((dotted, "read as a comment"))
        elif dotted in REMOVED:
            idle.append((dotted, "off, and DeepSpeed no longer has it"))
        elif isinstance(key, Key):
            if key.ignored:
                if not is_idle(value, key):
                    idle.append((dotted, key.ignored))
            elif value == "auto" and not key.auto and takes_default(dotted):
                idle.append((dotted, 'DeepSpeed\'s default, since nothing fills "auto" here'))
            elif not key.refused:
                result[name] = _as_deepspeed_spells(value, key)
        elif isinstance(value, dict):
            inner = _params_tree(values, key or {}) if name == "params" else key
            result[name] = _clean(value, inner or {}, f"{dotted}.", idle)
    return result


def _as_deepspeed_spells(value: Any, key: Key) -> Any:
    """5e8 becomes an integer where the key takes one, and "CPU" becomes "cpu" where that is a legal string."""
    if key.kind == "int" and isinstance(value, float):
        return int(value)
    if key.words and isinstance(value, str):
        return next((word for word in key.words if word.lower() == value.lower()), value)
    return value


def _params_tree(block: dict[str, Any], tree: Tree) -> Tree:
    """The parameters of an "optimizer" or "scheduler" block."""
    return optimizer_params(block["type"]) or SCHEDULERS.get(block["type"]) or tree


def drop_idle(config: dict[str, Any], stage: int) -> list[Idle]:
    """Remove keys without an effect at this ZeRO stage or without NVMe. Returns those that request something."""
    idle: list[Idle] = []
    zero = config.get("zero_optimization", {})
    for name in list(zero):
        if (_is_for_stage_3(name) and stage != 3) or (name in _STAGE_12_KEYS and stage not in (1, 2)):
            value = zero.pop(name)
            if name == "offload_param" and value.get("device", "none") == "none":
                continue
            if not is_idle(value) and not (name == "zero_hpz_partition_size" and value <= 1):
                idle.append((f"zero_optimization.{name}", f"no effect at ZeRO stage {stage}"))
    if stage < 2 and zero.get("overlap_comm"):
        zero["overlap_comm"] = False  # DeepSpeed does so itself for a PipelineModule
        idle.append(("zero_optimization.overlap_comm", f"no effect at ZeRO stage {stage}"))
    devices = {block: (zero.get(block) or {}).get("device", "none") for block in _NVME_KEYS}
    for block, names in _NVME_KEYS.items():
        for name in names if devices[block] == "cpu" else ():
            if zero[block].pop(name, None) not in (None, False, "auto"):
                idle.append((f"zero_optimization.{block}.{name}", 'no effect with "device": "cpu"'))
    if "nvme" not in devices.values() and config.pop("aio", None) is not None:
        idle.append(("aio", 'no effect without "device": "nvme"'))
    if config.get("steps_per_print") in ("auto", math.inf):
        del config["steps_per_print"]
    return idle


def _is_for_stage_3(name: str) -> bool:
    return name.startswith("stage3_") or f"stage3_{name}" in ZERO or name in (*_STAGE_3_KEYS, "offload_param")


def idle_notes(idle: tuple[Idle, ...]) -> list[str]:
    """One line for each reason and block: `sub_group_size, offload_param (zero_optimization): no effect at ...`."""
    groups: dict[tuple[str, str], list[str]] = {}
    blocks = {dotted for dotted, _ in idle}
    for dotted, reason in idle:
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
