"""Every key of a DeepSpeed JSON judged by itself: known, of the right type and range, and with an effect."""

import difflib
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from pretrain.ds_optimizers import (
    DEEPSPEED_REFUSED,
    KNOWN_NAMES,
    OPTIMIZERS,
    SCHEDULERS,
    TORCH_REFUSED,
    optimizer_params,
)
from pretrain.ds_read import DsFile
from pretrain.ds_schema import REMOVED, TREE, Key, Tree
from pretrain.errors import ConfigError

# Names of older versions and of other programs.
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas",
                "thread_count": "intra_op_parallelism", "check_overflow": "check_grad_overflow",
                "micro_batch_size": "train_micro_batch_size_per_gpu", "global_batch_size": "train_batch_size",
                "warmup_steps": "warmup_num_steps", "total_steps": "total_num_steps"}
_KINDS = {"bool": "true or false", "int": "a whole number", "number": "a number", "str": "a string",
          "list": "a list", "pair": "a list of two numbers"}


def check_keys(file: DsFile) -> None:
    """Raises ConfigError for the first key, in the file's order, that is unknown, mistyped or without effect."""
    _check_tree(file, file.values, TREE, "")
    _check_optimizer(file)
    _check_scheduler(file)


def _check_tree(file: DsFile, values: dict[str, Any], tree: Tree, prefix: str) -> None:
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if dotted in REMOVED:
            raise ConfigError(file.where(dotted), found="a key that DeepSpeed has removed", expected="no such key",
                              remedy=REMOVED[dotted])
        if dotted in ("optimizer.params", "scheduler.params"):
            _expect(file, dotted, value, dict, "an object: { ... }")
            continue
        key = tree.get(name)
        if key is None:
            raise ConfigError(file.where(dotted), found="an unknown key", expected=_known(tree, prefix),
                              remedy=suggest_key(name, tree))
        if isinstance(key, Key):
            check_value(file, dotted, value, key)
        elif not (value is None and prefix):  # "offload_param": null is how DeepSpeed writes its default
            _expect(file, dotted, value, dict, "an object: { ... }")
            _check_tree(file, value, key, f"{dotted}.")


def _known(tree: Tree, prefix: str) -> str:
    return f"one of: {', '.join(tree)}" if len(tree) < 8 else f"a key of {prefix.rstrip('.') or 'DeepSpeed'}"


def check_value(file: DsFile, dotted: str, value: Any, key: Key) -> None:
    """One value against its Key. Raises ConfigError."""
    where = file.where(dotted)
    if key.refused:
        if not _is_idle(value, key):
            idle = key.idle[0] if key.idle else "no such key"
            raise ConfigError(where, found=_show(value), expected=_show(idle) if key.idle else str(idle),
                              remedy=key.refused)
        return
    if value is None and key.null:
        return
    if value == "auto" and key.auto:
        return
    expected = _expected(key)
    if value == "auto":
        raise ConfigError(where, found='"auto"', expected=expected,
                          remedy='"auto" is not filled here; remove the key for DeepSpeed\'s default')
    if not _has_kind(value, key):
        raise ConfigError(where, found=_show(value), expected=expected)
    if key.words and value.lower() not in [word.lower() for word in key.words]:
        raise ConfigError(where, found=_show(value), expected=expected, remedy=_did_you_mean(value, key.words))
    for number in value if key.kind == "pair" else [value]:
        if (key.low is not None and number < key.low) or (key.high is not None and number > key.high):
            raise ConfigError(where, found=_show(value), expected=expected)


def _is_idle(value: Any, key: Key) -> bool:
    """Whether a value asks for nothing, as blocks copied from elsewhere do: {"enabled": false}."""
    if value is None or value is False or value == {} or any(value == idle for idle in key.idle):
        return not (value is True and True not in key.idle)
    return isinstance(value, dict) and value.get("enabled") is False


def _has_kind(value: Any, key: Key) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    kinds = {
        "bool": isinstance(value, bool),
        "int": number and float(value).is_integer(),
        "number": number,
        "str": isinstance(value, str),
        "list": isinstance(value, list),
        "pair": isinstance(value, list) and len(value) == 2
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value),
    }
    return kinds.get(key.kind, True)


def _expected(key: Key) -> str:
    if key.words:
        return "one of " + ", ".join(f'"{word}"' for word in key.words)
    text = _KINDS.get(key.kind, "another value")
    if key.low is not None:
        text += f" from {key.low:g}" + ("" if key.high is None else f" to {key.high:g}")
    return text + (' or "auto"' if key.auto else "")


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expect(file: DsFile, dotted: str, value: Any, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(file.where(dotted), found=_show(value), expected=expected)


def suggest_key(name: str, tree: Tree) -> str:
    """Where an unknown key belongs, or what it was meant to be: siblings first, then the whole tree."""
    if _OTHER_NAMES.get(name) in tree:
        return f'did you mean "{_OTHER_NAMES[name]}"?'
    everywhere = list(_walk(TREE, ""))
    homes = [parent for parent, known in everywhere if known == name]
    if homes:
        places = " or ".join(f'"{home}"' for home in homes[:3])
        return f"it belongs under {places}" if "" not in homes else "it belongs at the top level"
    if meant := _did_you_mean(name, [*tree, *(path for path in REMOVED if "." not in path)]):
        return meant
    for parent, known in everywhere:
        if closest(name, [known]):
            return f'did you mean "{known}" ' + (f'under "{parent}"?' if parent else "at the top level?")
    return ""


def _walk(tree: Tree, parent: str) -> Iterator[tuple[str, str]]:
    """(dotted parent, key) of every key of the tree, and of the optimizers' and schedulers' parameters."""
    for name, key in tree.items():
        yield parent, name
        if not isinstance(key, Key):
            yield from _walk(key, f"{parent}.{name}".lstrip("."))
    if parent in ("optimizer", "scheduler"):
        known = OPTIMIZERS if parent == "optimizer" else SCHEDULERS
        yield from ((f"{parent}.params", name) for name in {n: None for params in known.values() for n in params})


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` is a slip of the finger away from, or close to; "" where there is none."""
    names = list(known)
    for name in names:
        if len(name) == len(word) and sum(a != b for a, b in zip(name, word, strict=True)) == 1:
            return name
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    return close[0] if close else ""


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    meant = closest(word, known)
    return f'did you mean "{meant}"?' if meant else ""


def _check_optimizer(file: DsFile) -> None:
    kind = file.get("optimizer.type")
    if kind is None:
        raise ConfigError(file.where("optimizer.type" if "optimizer" in file.values else "optimizer"), found="nothing",
                          expected='"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}',
                          remedy=f"known types: {', '.join(KNOWN_NAMES)}")
    tree = optimizer_params(kind)
    if tree is None:
        reason = DEEPSPEED_REFUSED.get(kind.lower()) or TORCH_REFUSED.get(kind)
        raise ConfigError(file.where("optimizer.type"), found=_show(kind), expected=f"one of {', '.join(KNOWN_NAMES)}",
                          remedy=reason or _did_you_mean(kind, KNOWN_NAMES))
    _check_tree(file, file.get("optimizer.params") or {}, tree, "optimizer.params.")


def _check_scheduler(file: DsFile) -> None:
    if "scheduler" not in file.values:
        return
    kind = file.get("scheduler.type")
    if kind not in SCHEDULERS:
        found = "nothing" if kind is None else _show(kind)
        raise ConfigError(file.where("scheduler.type"), found=found, expected=f"one of {', '.join(SCHEDULERS)}",
                          remedy=_did_you_mean(kind or "", SCHEDULERS)
                          or "or remove the block and use --lr_schedule; torch's own need another optimizer class")
    _check_tree(file, file.get("scheduler.params") or {}, SCHEDULERS[kind], "scheduler.params.")
