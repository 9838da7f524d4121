"""Take over the DeepSpeed JSON, or the blocks of one, that another program's settings contain."""

import os
from collections.abc import Mapping
from typing import Any

from pretrain.config.ds_json.check_keys import check_value, is_comment, requests_nothing, suggest_key, takes_default
from pretrain.config.ds_json.optimizers import SCHEDULERS, optimizer_params
from pretrain.config.ds_json.read import DsFile, parse_ds_config, read_ds_config
from pretrain.config.ds_json.schema import OLD_OFFLOAD, REMOVED, TREE, UNREAD, Key, Tree
from pretrain.errors import ConfigError
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import Settings

# Keys that other programs write into their blocks, and that DeepSpeed does not read: "fp16": true inside of "fp16" in
# GPT-NeoX's configurations, and parameters of 1-bit Adam in its defaults of the optimizer.
_UNREAD = {"fp16.fp16", "fp16.type", "bf16.bf16", "bf16.type", "optimizer.params.freeze_step",
           "optimizer.params.cuda_aware"}
_ONEBIT = ("onebitadam", "onebitlamb", "zerooneadam")


def take_json(result: Result, file: DsFile, *, prefix: str = "") -> None:
    """Copy the keys that DeepSpeed and this program know into the result's JSON, and record each one.

    `prefix` is written before the names of the rows. Raises ConfigError for unknown keys and wrong values.
    """
    _take(result, file, file.values, {**UNREAD, **TREE}, "", prefix)


def take_json_file(settings: Settings, result: Result, name: str, *, flag: str) -> bool:
    """Take the JSON whose path a setting gives. `flag`: names the file in errors about its text.

    Returns whether its text is known: a script may write it by commands that are not understood.
    """
    path = settings.text(name)
    written = settings.written.get(path)
    if written is not None:
        result.remaining += written.notes
        if written.text is not None:
            take_named_json(result, parse_ds_config(path, written.text), name)
            return True
        result.none("MATTERS: its settings are not known; the script writes it", name)
        result.remaining.append(f"{settings.where(name)}: what the script writes into {path} is not known; compare "
                                "ds_config.json with that file, or write its name into the script")
        return False
    from_script = os.path.join(os.path.dirname(settings.where(name).partition(": ")[0]), path)
    path = path if os.path.isfile(path) or not os.path.isfile(from_script) else from_script
    if not os.path.isfile(path):
        raise ConfigError(settings.where(name), problem=f"there is no file {path}", remedy="give its path from here")
    take_named_json(result, read_ds_config(path, flag=flag), name)
    return True


def take_named_json(result: Result, file: DsFile, name: str) -> None:
    """Take the JSON that a setting contains or names."""
    take_json(result, file, prefix=f"{name}: ")
    result.used("its keys are listed one by one", name)


def _take(result: Result, file: DsFile, values: Mapping[str, Any], tree: Tree, block: str, prefix: str) -> None:
    for name, value in values.items():
        dotted = f"{block}{name}"
        key, row = tree.get(name), f"{prefix}{dotted}"
        if dotted in REMOVED:
            result.none(f"DeepSpeed no longer has it; {REMOVED[dotted]}", row)
        elif is_comment(name) and key is None:
            result.none("a comment", row)
        elif dotted in _UNREAD:
            result.none("DeepSpeed does not read it", row)
        elif dotted in ("optimizer.params", "scheduler.params") and isinstance(value, dict):
            _take(result, file, value, _parameters(file, block), f"{dotted}.", prefix)
        elif key is None:
            raise ConfigError(file.where(dotted), problem="DeepSpeed has no such key",
                              remedy=suggest_key(name, tree, block) or "remove it")
        elif isinstance(key, dict):
            _take_block(result, file, dotted, value, key, prefix)
        else:
            _take_value(result, file, dotted, value, key, row)


def _take_block(result: Result, file: DsFile, dotted: str, value: Any, tree: Tree, prefix: str) -> None:
    if isinstance(value, dict):
        if not value:
            result.none("an empty block", f"{prefix}{dotted}")
        elif value.get("enabled") is False:
            result.none("off", *(f"{prefix}{name}" for name in flat_names(value, f"{dotted}.")))
        else:
            _take(result, file, value, tree, f"{dotted}.", prefix)
    elif value is None or (value == "auto" and takes_default(dotted)):
        result.none("DeepSpeed's default", f"{prefix}{dotted}")
    else:
        raise ConfigError(file.where(dotted), found=str(value), expected="an object: { ... }")


def _take_value(result: Result, file: DsFile, dotted: str, value: Any, key: Key, row: str) -> None:
    if key.rejected:
        result.none("off" if requests_nothing(value, key) else f"left out: {key.rejected}", row)
    elif value == "auto" and not key.auto:
        result.none("DeepSpeed's default", row)
    elif key.ignored:
        result.none(key.ignored, row)
    elif dotted.rpartition(".")[2] in OLD_OFFLOAD and not value:
        result.none("off", row)
    elif value is None:
        result.none("DeepSpeed's default", row)
    else:
        check_value(file, dotted, value, key)
        result.set_json(dotted, int(value) if key.kind == "int" and isinstance(value, float) else value, row)


def _parameters(file: DsFile, block: str) -> Tree:
    """Return the parameters of the file's optimizer or scheduler. Raises ConfigError for one that is not here."""
    kind = str(file.get(f"{block}type") or "")
    if block == "scheduler.":
        if kind not in SCHEDULERS:
            raise ConfigError(file.where("scheduler.type"), found=kind, expected=f"one of {', '.join(SCHEDULERS)}")
        return SCHEDULERS[kind]
    tree = optimizer_params(kind)
    if kind.lower() in _ONEBIT:
        raise ConfigError(file.where("optimizer.type"), problem=f"this version of DeepSpeed has no {kind}",
                          remedy='"AdamW" has the same update without compression')
    if tree is None:
        raise ConfigError(file.where("optimizer.type"), problem=f"{kind or 'nothing'} is no optimizer here",
                          remedy='"AdamW" is the usual one')
    return tree


def flat_names(values: Mapping[str, Any], block: str = "") -> list[str]:
    """List the dotted names of all keys that have a value, at every depth."""
    names: list[str] = []
    for name, value in values.items():
        is_block = isinstance(value, dict) and bool(value)
        names += flat_names(value, f"{block}{name}.") if is_block else [f"{block}{name}"]
    return names
