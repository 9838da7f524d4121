"""Validate each key of a DeepSpeed JSON by itself, and leave out the keys that never have an effect here."""

import json
import math
from collections.abc import Iterator
from typing import Any

from pretrain.config.ds_json.optimizers import (
    DEEPSPEED_REJECTED,
    KNOWN_NAMES,
    OPTIMIZERS,
    SCHEDULERS,
    TORCH_REJECTED,
    import_optimizer,
    optimizer_params,
)
from pretrain.config.ds_json.read import DsFile
from pretrain.config.ds_json.schema import BLOCKS_WITH_DEFAULTS, OLD_OFFLOAD, REMOVED, TREE, UNREAD, Key, Tree
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.other_programs import MATTERS, NO_EFFECT, degree_for, hint_for, without_counterpart
from pretrain.distributed.requirements import INSTALL, deepspeed_version, is_at_least
from pretrain.errors import ConfigError, closest
from pretrain.model.families.family import listing
from pretrain.own_code import is_own

IgnoredKey = tuple[str, str]  # a dotted key, and why it has no effect

# Key names of older DeepSpeed versions and of other programs.
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas",
                "check_overflow": "check_grad_overflow",
                "micro_batch_size": "train_micro_batch_size_per_gpu", "global_batch_size": "train_batch_size",
                "warmup_steps": "warmup_num_steps", "total_steps": "total_num_steps",
                "sequence_parallel": "sequence_parallel_size", "profiler": "flops_profiler"}
_COMMENTS = ("comment", "comments", "description", "note", "notes")
_RUN_FLAGS = FLAGS.keys()
_KINDS = {"bool": "true or false", "int": "a whole number", "number": "a number", "str": "a string",
          "list": "a list of strings", "pair": "a list of two numbers", "interval": "a number"}
_TOO_LARGE = 2**63  # DeepSpeed and torch store 64-bit integers


def check_json_keys(file: DsFile) -> tuple[dict[str, Any], list[IgnoredKey]]:
    """Return the JSON in DeepSpeed's current spelling, and the keys to report that are left out or renamed.

    Raises ConfigError for the first key, in the file's order, that is unknown, misspelt or not supported.
    """
    ignored: list[IgnoredKey] = []
    config = _check_tree(file, file.values, {**UNREAD, **TREE}, "", ignored)
    _check_old_names(file)
    for block, params_tree in (("optimizer", _optimizer_tree), ("scheduler", _scheduler_tree)):
        if block in file.values:
            tree = params_tree(file)
            params = _check_tree(file, file.get(f"{block}.params") or {}, tree, f"{block}.params.", ignored)
            if "params" in config[block]:
                config[block]["params"] = params
    for block in ("compile", "data_efficiency", *UNREAD):  # no key of them is passed on
        config.pop(block, None)
    if compiles_blocks(file.values):
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


def _check_old_names(file: DsFile) -> None:
    """Raise ConfigError if an old key name and its new name have different values: DeepSpeed would ignore one."""
    pairs = [("bfloat16", "bf16", file.get("bfloat16") not in (None, file.get("bf16")))]
    pairs += [(f"zero_optimization.{old}", f"zero_optimization.{new}", file.get(f"zero_optimization.{old}") is True)
              for old, new in OLD_OFFLOAD.items()]
    for old, new, differs in pairs:
        if differs and file.get(new) is not None:
            raise ConfigError(file.where(old), problem=f'"{new}" is set too, to another value',
                              remedy="both are names of the same setting; remove one of them")


def _check_tree(file: DsFile, values: dict[str, Any], tree: Tree, prefix: str,
                ignored: list[IgnoredKey]) -> dict[str, Any]:
    """Return a copy of a block without the keys that have no effect, which are added to `ignored`."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        dotted, key = f"{prefix}{name}", tree.get(name)
        if dotted in REMOVED:
            is_auto = isinstance(value, dict) and value.get("enabled") == "auto"  # "amp" in transformers' documentation
            if not (is_auto or requests_nothing(value) or (name == "mics_shard_size" and value == -1)):
                raise ConfigError(file.where(dotted), problem="DeepSpeed no longer has this key",
                                  remedy=f"{REMOVED[dotted]}; remove the key")
            ignored.append((dotted, 'off, since nothing fills "auto" here, and DeepSpeed no longer has it' if is_auto
                            else "off, and DeepSpeed no longer has it"))
        elif dotted in ("optimizer.params", "scheduler.params"):
            _expect(file, dotted, value, dict, "an object: { ... }")
            result[name] = value  # `check_json_keys` validates it later
        elif key is None and is_comment(name):
            ignored.append((dotted, "read as a comment"))
        elif key is None:
            raise _unknown(file, values, tree, prefix, name)
        elif isinstance(key, Key):
            is_default = value == "auto" and takes_default(dotted)
            if not is_default:
                check_value(file, dotted, value, key)
            if key.ignored:
                ignored += [] if requests_nothing(value, key) else [(dotted, key.ignored)]
            elif is_default and not key.auto:
                ignored.append((dotted, 'DeepSpeed\'s default, since nothing fills "auto" here'))
            elif not key.rejected:
                result[name] = _normalize(value, key)
        # "offload_param": null is how DeepSpeed writes its default
        elif not (value is None and prefix) and not (value == "auto" and takes_default(dotted)):
            _expect(file, dotted, value, dict, "an object: { ... }")
            result[name] = _check_tree(file, value, key, f"{dotted}.", ignored)
    return result


def _normalize(value: Any, key: Key) -> Any:
    """Convert 5e8 to an integer for an integer key; "CPU" to "cpu", and "float32" to "fp32", if that is the choice."""
    if key.kind == "int" and isinstance(value, float):
        return int(value)
    if key.choices and isinstance(value, str):
        names = {choice.lower(): choice for choice in key.choices} | dict(key.other_names)
        return names.get(value.lower(), value)
    return value


def _unknown(file: DsFile, values: dict[str, Any], tree: Tree, prefix: str, name: str) -> ConfigError:
    """Return the error for an unknown key, with a suggestion if there is one.

    It names up to eight unknown keys of the block at once, because files of other programs have many.
    """
    block, _, of_params = prefix.partition(".")
    kind = file.get(f"{block}.type") if of_params == "params." else ""
    unknown = [word for word in values if word not in tree and word not in REMOVED and not is_comment(word)]
    found = f"unknown keys: {', '.join(unknown[:8])}{', ...' * (len(unknown) > 8)}" if len(unknown) > 1 else \
        "an unknown key"
    remedy = suggest_key(name, tree, prefix, kind) or (
        "remove keys that DeepSpeed does not have" if prefix else
        "remove unknown keys: DeepSpeed would ignore them")
    return ConfigError(file.where(prefix + name), found=found, expected=_known(tree, prefix), remedy=remedy)


def _known(tree: Tree, prefix: str) -> str:
    return f"one of: {', '.join(tree)}" if len(tree) < 8 else f"a key of {prefix.rstrip('.') or 'DeepSpeed'}"


def check_value(file: DsFile, dotted: str, value: Any, key: Key) -> None:
    """Validate one value. Raises ConfigError."""
    where = file.where(dotted)
    if key.since and not is_at_least(key.since):
        raise ConfigError(where, problem=f"DeepSpeed {deepspeed_version()} does not have this key",
                          remedy=f"Remove it, or {INSTALL}")
    if key.rejected:
        if not requests_nothing(value, key):
            expected = _show(key.neutral[0]) if key.neutral else "no such key"
            raise ConfigError(where, found=_show(value), expected=expected, remedy=key.rejected)
        return
    if value is None and key.null:
        return
    if value == "auto" and key.auto:
        return
    expected = expected_value(key)
    if value == "auto":
        raise ConfigError(where, found='"auto"', expected=expected,
                          remedy='nothing fills "auto" here; remove the key to get DeepSpeed\'s default')
    if not _has_kind(value, key):
        raise ConfigError(where, found=_show(value), expected=expected)
    if key.choices and _normalize(value, key) not in key.choices:
        raise ConfigError(where, found=_show(value), expected=expected, word=value, known=key.choices)
    for number in value if key.kind == "pair" else [value]:
        if (key.low is not None and number < key.low) or (key.high is not None and number > key.high):
            raise ConfigError(where, found=_show(value), expected=expected)


def _has_kind(value: Any, key: Key) -> bool:
    if key.kind == "bool":
        return isinstance(value, bool)
    if key.kind == "int":
        return _is_number(value) and float(value).is_integer() and abs(value) < _TOO_LARGE
    if key.kind == "number":
        return _is_number(value)
    if key.kind == "interval":
        return _is_number(value) or value == math.inf
    if key.kind == "str":
        return isinstance(value, str)
    if key.kind == "list":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key.kind == "pair":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def expected_value(key: Key) -> str:
    """Describe the legal values of a key."""
    if key.choices:
        return "one of " + ", ".join(f'"{word}"' for word in key.choices)
    text = _KINDS.get(key.kind, "another value")
    if key.low is not None:
        text += f" from {key.low:.10g}"
    if key.high is not None:
        text += f" {'to' if key.low is not None else 'up to'} {key.high:.10g}"
    return text + (' or "auto"' if key.auto else "")


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expect(file: DsFile, dotted: str, value: Any, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(file.where(dotted), found=_show(value), expected=expected)


def suggest_key(name: str, tree: Tree, prefix: str = "", kind: str = "") -> str:
    """Suggest what an unknown key may mean: another name, its block, or a similar key of this or another block.

    `tree` are the keys of the block, and `prefix` is its dotted name with a dot at the end. `kind` is the type of the
    optimizer or scheduler whose parameters they are.
    """
    if _OTHER_NAMES.get(name) in tree:
        return f'Did you mean "{_OTHER_NAMES[name]}"?'
    other_name = name.lower().replace("-", "_")
    if degree := degree_for(other_name):
        return f"write the degree as {degree}"
    if kind and (owners := _types_with(name, prefix)):
        return f"{kind} has no such parameter; {listing(owners)} {'have' if len(owners) > 1 else 'has'} it"
    all_keys = list(_walk(TREE, ""))
    parents = {parent: reason for parent, known, reason in all_keys if known == name}
    if parents:
        blocks = " or ".join(f'"{parent}"' for parent in list(parents)[:3])
        place = f"under {blocks}" if "" not in parents else "at the top level"
        reason = "" if "" in parents.values() else next(iter(parents.values()))
        return f"it belongs {place}" + (f", and is rejected there: {reason}" if reason else "")
    accepted = [(parent, known) for parent, known, reason in all_keys if not reason]
    return _by_meaning(name, other_name, tree, accepted) or _by_letters(name, tree, accepted)


def _by_meaning(name: str, other_name: str, tree: Tree, accepted: list[tuple[str, str]]) -> str:
    """Suggest the key or flag of which `name` is another name: pipeline_stages, gradient_accumulation_dtype."""
    for parent, known in accepted:
        if parent and other_name in (f"{parent}.{known}".replace(".", "_"), f"{parent.rpartition('.')[2]}_{known}"):
            return _elsewhere(parent, known)
    if other_name in _RUN_FLAGS:
        return f"--{other_name} is a flag of the run, and no key of DeepSpeed"
    if hint := hint_for(name):
        return hint
    for table in (MATTERS, NO_EFFECT):
        if reason := without_counterpart(table, other_name):
            return f"remove it: {reason[0]}"
    if here := min((known for known in tree if _abbreviates(other_name, known)), key=len, default=""):
        return _here(tree, here)
    return next((_elsewhere(parent, known) for parent, known in accepted
                 if _abbreviates(other_name, known, is_complete=True)), "")


def _by_letters(name: str, tree: Tree, accepted: list[tuple[str, str]]) -> str:
    """Suggest the key that `name` misspells: one of this block, or else of another."""
    if known := closest(name, [*tree, *(path for path in REMOVED if "." not in path)]):
        return _here(tree, known)
    return next((_elsewhere(parent, known) for parent, known in accepted
                 if len(name) > 2 and closest(name, [known])), "")


def _here(tree: Tree, known: str) -> str:
    key = tree.get(known)
    reason = REMOVED[known] if key is None else key.rejected if isinstance(key, Key) else ""
    return f'"{known}" would be rejected, too: {reason}' if reason else f'Did you mean "{known}"?'


def _elsewhere(parent: str, known: str) -> str:
    return f'Did you mean "{known}" ' + (f'under "{parent}"?' if parent else "at the top level?")


def _abbreviates(word: str, name: str, *, is_complete: bool = False) -> bool:
    """Return whether `word` has the parts of `name`, longer or shorter: gradient_accumulation_dtype, grad_accum_dtype.

    Unless `is_complete`, the last parts of `name` may be missing.
    """
    words, names = word.split("_"), name.split("_")
    return 1 < len(words) <= len(names) and (len(words) == len(names) or not is_complete) and all(
        min(len(own), len(part)) > 1 and (own.startswith(part) or part.startswith(own))
        for own, part in zip(words, names, strict=False))


def _types_with(name: str, prefix: str) -> list[str]:
    """Return the types of optimizers or schedulers that have the parameter `name`."""
    if prefix == "scheduler.params.":
        return [kind for kind, params in SCHEDULERS.items() if name in params]
    return [kind for kind in KNOWN_NAMES if name in (optimizer_params(kind) or {})]


def _walk(tree: Tree, parent: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted parent, key, why it is rejected) for every key of the tree, of optimizers and of schedulers."""
    for name, key in tree.items():
        yield parent, name, key.rejected if isinstance(key, Key) else ""
        if not isinstance(key, Key):
            yield from _walk(key, f"{parent}.{name}".lstrip("."))
    if parent in ("optimizer", "scheduler"):
        trees = [optimizer_params(kind) or {} for kind in KNOWN_NAMES] if parent == "optimizer" else SCHEDULERS.values()
        params = {name: key for tree in trees for name, key in reversed(tree.items())}
        yield from _walk(params, f"{parent}.params")


def _optimizer_tree(file: DsFile) -> Tree:
    """Return the parameters of the optimizer. Raises ConfigError for an unknown type."""
    kind = file.get("optimizer.type")
    if kind is None:
        raise ConfigError(file.where("optimizer.type"), found="nothing",
                          expected='"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}',
                          remedy=f"the known types are {', '.join(KNOWN_NAMES)}")
    if is_own(kind) and file.imports_code:
        return import_optimizer(kind, f"{file.where('optimizer.type')}: {kind}").params
    tree = optimizer_params(kind)
    if tree is None:
        reason = DEEPSPEED_REJECTED.get(kind.lower()) or TORCH_REJECTED.get(kind)
        raise ConfigError(file.where("optimizer.type"), found=_show(kind), expected=f"one of {', '.join(KNOWN_NAMES)}",
                          remedy=reason or "", word="" if reason else kind, known=KNOWN_NAMES)
    since = OPTIMIZERS[kind.lower()].since
    if since and not is_at_least(since):
        raise ConfigError(file.where("optimizer.type"), problem=f"{kind} is supported from DeepSpeed {since} on; "
                          f"{deepspeed_version()} is installed", remedy=INSTALL)
    return tree


def _scheduler_tree(file: DsFile) -> Tree:
    """Return the parameters of the scheduler. Raises ConfigError for an unknown type."""
    kind = file.get("scheduler.type")
    if kind not in SCHEDULERS:
        found = "nothing" if kind is None else _show(kind)
        raise ConfigError(file.where("scheduler.type"), found=found, expected=f"one of {', '.join(SCHEDULERS)}",
                          remedy="remove the block and use --lr_schedule, if none of them fits",
                          word=kind or "", known=SCHEDULERS)
    return SCHEDULERS[kind]
