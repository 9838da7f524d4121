"""Parse the layout of any DeepSpeed JSON, even one that training rejects, for memory and speed estimates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pretrain.config.auto_values import auto_precision, complete_batch_sizes, fill_zero_sizes
from pretrain.config.ds_json.check_keys import check_json_keys, rename_old_keys
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import TREE, UNREAD
from pretrain.config.layout import SIZE_KEYS, Layout, parse_layout
from pretrain.errors import ConfigError

_PARALLEL_KEYS = ("tensor_parallel", "sequence_parallel_size")


def lenient_layout(config: Mapping[str, Any], *, world_size: int, seq_length: int = 1024,
                   hidden_size: int | None = None, micro_batch_size: int | None = None,
                   gradient_accumulation_steps: int | None = None, num_parameters: int | None = None,
                   device_kind: str = "cuda", name: str = "") -> Layout:
    """Return the layout that a DeepSpeed JSON describes. The JSON may be written for another program.

    `micro_batch_size` and `gradient_accumulation_steps` are used if the JSON's values are missing or "auto".
    `hidden_size` fills "auto" ZeRO sizes. `num_parameters` is an upper limit for the reduce bucket (elements).
    `Layout.notes` lists keys that DeepSpeed 0.19.8 does not have, and the first key that training rejects.

    Raises:
        ConfigError: for degrees that do not divide the ranks, and for invalid values.
    """
    notes = _key_notes(config, name)
    filled = _copy(config)
    _remove_auto_offload(filled)
    rename_old_keys(filled)
    _fill_auto(filled, hidden_size, notes)
    layout = parse_layout(filled, world_size=world_size, seq_length=seq_length, device_kind=device_kind, name=name)
    total = filled.get("train_batch_size")
    has_total = isinstance(total, (int, float)) and not isinstance(total, bool)
    micro, steps, _ = complete_batch_sizes(
        layout.micro_batch_size if "train_micro_batch_size_per_gpu" in filled else micro_batch_size,
        layout.gradient_accumulation_steps if "gradient_accumulation_steps" in filled else gradient_accumulation_steps,
        int(total) if has_total and total else None, layout.data_parallel_size)
    layout = replace(layout, micro_batch_size=max(1, micro), gradient_accumulation_steps=max(1, steps))
    if num_parameters is not None:
        layout = replace(layout, reduce_bucket_size=min(layout.reduce_bucket_size, num_parameters))
    if get_value(filled, "activation_checkpointing") and not layout.activation_checkpoint_interval:
        notes.append('"activation_checkpointing" sets how layers are recomputed, and does not turn it on; '
                     '"pipeline": {"activation_checkpoint_interval": 1} recomputes every block')
    return replace(layout, notes=tuple(notes)).check()


def _key_notes(config: Mapping[str, Any], name: str) -> list[str]:
    """Notes about unknown keys, and about the first key that training rejects."""
    notes = [f'"{key}" is not understood, and the estimate ignores it' for key in config
             if key not in TREE and key not in UNREAD and key not in _PARALLEL_KEYS]
    try:
        check_json_keys(DsFile(name or "this JSON", dict(config)))
    except ConfigError as error:
        notes.append(f"pretrain/train.py rejects this JSON: {error}")
    return notes


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the JSON objects at every depth, without keys that are null."""
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in config.items()
            if value is not None}


def _fill_auto(config: dict[str, Any], hidden_size: int | None, notes: list[str]) -> None:
    """Replace or remove every "auto", in place. Adds a note for each size that gets DeepSpeed's default."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        if hidden_size is not None:
            fill_zero_sizes(zero, hidden_size)
        for key in SIZE_KEYS:
            notes += [f'zero_optimization.{name}: "auto" is replaced by DeepSpeed\'s default'
                      for name in (key, f"stage3_{key}") if zero.get(name) == "auto"]
    states = [get_value(config, f"{block}.enabled") for block in ("bf16", "fp16")]
    if "auto" in states:
        config[auto_precision(*states)]["enabled"] = True
    _remove_auto(config)


def _remove_auto_offload(config: dict[str, Any]) -> None:
    """Remove "auto" from the offload blocks, so that it does not override "cpu_offload", their older spelling."""
    for name in ("offload_optimizer", "offload_param"):
        block = get_value(config, f"zero_optimization.{name}")
        if isinstance(block, dict):
            _remove_auto(block)


def _remove_auto(config: dict[str, Any]) -> None:
    for key, value in list(config.items()):
        if value == "auto":
            del config[key]
        elif isinstance(value, dict):
            _remove_auto(value)
