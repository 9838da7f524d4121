"""Remove keys of a DeepSpeed JSON that have no effect, with a note for each, and normalize the spelling of the rest."""

import math
from typing import Any

from pretrain.config.ds_json.optimizers import SCHEDULERS, optimizer_params
from pretrain.config.ds_json.schema import BLOCKS_WITH_DEFAULTS, OLD_OFFLOAD, REMOVED, TREE, UNREAD, ZERO, Key, Tree

IgnoredKey = tuple[str, str]  # a dotted key, and why it has no effect

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
    """Return whether a key is a comment: "_comment", "//", "$schema", or a key disabled by a leading "_"."""
    return name[:1] in ("_", "#", "$") or name.startswith("//") or name.lower() in _COMMENTS


def requests_nothing(value: Any, key: Key | None = None) -> bool:
    """Return whether a value turns nothing on: false, null, {}, {"enabled": false}, or a neutral value of the key."""
    if value is None or value is False or value == {}:
        return True
    if key is not None and any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                               for neutral in key.neutral):
        return True
    return isinstance(value, dict) and value.get("enabled") is False


def takes_default(dotted: str) -> bool:
    """Return whether DeepSpeed replaces "auto" by the key's default (runtime/config_utils.py).

    zero_optimization.stage must be a number.
    """
    block, _, rest = dotted.partition(".")
    return block in BLOCKS_WITH_DEFAULTS and rest not in ("", "stage")


def clean(values: dict[str, Any]) -> tuple[dict[str, Any], list[IgnoredKey]]:
    """Return a copy in DeepSpeed's current spelling, without the keys that never have an effect in this program.

    Also returns the removed and renamed keys to report, each with a reason.
    """
    ignored: list[IgnoredKey] = []
    config = _clean(values, {**UNREAD, **TREE}, "", ignored)
    for block in ("compile", "data_efficiency", *UNREAD):  # no key of them is passed on
        config.pop(block, None)
    if compiles_blocks(values):
        ignored.append(("compile", "read as --compile_blocks"))
    ignored += [(f"zero_optimization.{old}", f'read as "{new}": {{"device": "cpu"}}') for old, new in
                rename_old_keys(config)]
    return config, ignored


def compiles_blocks(values: dict[str, Any]) -> bool:
    """Return whether "compile" has keys of earlier DeepSpeed versions that ask for torch.compile."""
    block = values.get("compile") or {}
    asked = any(name in block for name in ("enabled", "disable", "backend"))
    return asked and block.get("enabled", True) is not False and block.get("disable", False) is not True


def rename_old_keys(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Write keys of earlier DeepSpeed versions in the current spelling. Returns (old, new) of the offload keys."""
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
        config.pop("bfloat16", None)
    zero = config.get("zero_optimization")
    renamed = []
    for old, new in OLD_OFFLOAD.items():
        if isinstance(zero, dict) and zero.pop(old, None) is True:
            block = zero.get(new)
            zero[new] = {"device": "cpu", **(block if isinstance(block, dict) else {})}
            renamed.append((old, new))
    return renamed


def _clean(values: dict[str, Any], tree: Tree, prefix: str, ignored: list[IgnoredKey]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        dotted, key = prefix + name, tree.get(name)
        if key is None and is_comment(name):
            ignored.append((dotted, "read as a comment"))
        elif dotted in REMOVED:
            ignored.append((dotted, "off, and DeepSpeed no longer has it"))
        elif isinstance(key, Key):
            if key.ignored:
                if not requests_nothing(value, key):
                    ignored.append((dotted, key.ignored))
            elif value == "auto" and not key.auto and takes_default(dotted):
                ignored.append((dotted, 'DeepSpeed\'s default, since nothing fills "auto" here'))
            elif not key.rejected:
                result[name] = _normalize(value, key)
        elif isinstance(value, dict):
            inner = _params_tree(values, key or {}) if name == "params" else key
            result[name] = _clean(value, inner or {}, f"{dotted}.", ignored)
    return result


def _normalize(value: Any, key: Key) -> Any:
    """Convert 5e8 to an integer for an integer key, and "CPU" to "cpu" if that is the legal string."""
    if key.kind == "int" and isinstance(value, float):
        return int(value)
    if key.choices and isinstance(value, str):
        return next((choice for choice in key.choices if choice.lower() == value.lower()), value)
    return value


def _params_tree(block: dict[str, Any], tree: Tree) -> Tree:
    """Return the legal parameters of an "optimizer" or "scheduler" block."""
    return optimizer_params(block["type"]) or SCHEDULERS.get(block["type"]) or tree


_SEQUENCE_DTYPE = "seq_parallel_communication_data_type"


def drop_ignored_keys(config: dict[str, Any], zero_stage: int) -> list[IgnoredKey]:
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


def ignored_key_notes(ignored: tuple[IgnoredKey, ...]) -> list[str]:
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
