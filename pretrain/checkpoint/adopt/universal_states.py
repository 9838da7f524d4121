"""Read what a universal checkpoint records besides tensors: steps, parameter groups, schedule, loss scale, JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.convert.universal import DECAYS
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.errors import ConfigError

_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ANOTHER = "use another checkpoint"
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ADAM = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class EngineStates:
    """The states of a universal checkpoint that are no tensors. The fields are those of `ForeignRun`."""

    files: tuple[Path, ...]
    step: int
    optimizer_step: float
    skipped_steps: int
    optimizer: dict[str, Any]
    # of all parameters, or of each one by its name in the files; None: not recorded
    weight_decay: float | Mapping[str, float] | None
    learning_rate: float | None
    schedule: dict[str, Any]
    global_batch_size: int | None
    consumed_samples: int | None
    seq_length: int | None
    precision: str
    loss_scale: dict[str, float] | None
    seed: int | None
    ds_config: dict[str, Any] | None


def read_engine_states(folder: Path, names: Sequence[str], states: Sequence[str]) -> EngineStates:
    """Read the model-states file and zero/optimizer_state.pt of a universal checkpoint.

    Args:
        names: of the parameters in the files.
        states: optimizer states that the checkpoint has for each weight.

    Raises ConfigError.
    """
    path = next((folder / name for name in _MODEL_STATES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(str(folder), problem=f"there is neither {_MODEL_STATES[0]} nor {_MODEL_STATES[1]}",
                          remedy="copy the whole output folder of ds_to_universal")
    model, optimizer_path = _dict_in(path), folder / "zero/optimizer_state.pt"
    optimizer = _dict_in(optimizer_path)
    ds_config = model["ds_config"] if isinstance(model.get("ds_config"), dict) else None
    groups = optimizer.get("param_groups")
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    step = _count(model, "global_steps", path)
    assert step is not None
    samples = _count(model, "consumed_samples" if "consumed_samples" in model else "global_samples", path, None)
    return EngineStates(
        files=(path, optimizer_path), step=step, optimizer_step=_optimizer_step(folder, optimizer, names, states),
        skipped_steps=_count(model, "skipped_steps", path, 0) or 0, optimizer=_optimizer(ds_config, groups, states),
        weight_decay=_weight_decay(model, optimizer, groups),
        learning_rate=_number(groups[0].get("lr")) if groups else None, schedule=_schedule(model, ds_config),
        global_batch_size=_batch_size(ds_config, model), consumed_samples=samples,
        seq_length=_count(model, "seq_length", path, None), precision=_precision(ds_config),
        loss_scale=_loss_scale(optimizer), seed=_count(model, "seed", path, None), ds_config=ds_config)


def _dict_in(path: Path) -> dict[str, Any]:
    """Return the dict in a pickle; its tensors are memory-mapped. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(str(path), problem="this file is missing",
                          remedy="copy the whole output folder of ds_to_universal")
    value = load_pickle(path, mmap=True)
    if not isinstance(value, dict):
        raise ConfigError(str(path), found=type(value).__name__, expected="a dict", remedy=_ANOTHER)
    return value


_REQUIRED = object()


def _count(values: Mapping[str, Any], key: str, path: Path, default: Any = _REQUIRED) -> int | None:
    """Return a whole number; without the key, the default. Raises ConfigError."""
    value = values.get(key, default)
    if value is default and default is not _REQUIRED:
        return default
    if type(value) is not int or value < 0:
        raise ConfigError(f"{path}: {key}", found="nothing" if value is _REQUIRED else repr(value),
                          expected="a whole number", remedy=_ANOTHER)
    return value


def _number(value: Any) -> float | None:
    """Return a number, or the number of a tensor with one element; None for other values."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _optimizer_step(folder: Path, optimizer: Mapping[str, Any], names: Iterable[str], states: Sequence[str]) -> float:
    """Return the optimizer's step count: of the parameters (ZeRO-1 and 2), or of the optimizer's state (ZeRO-3).

    Raises ConfigError if parameters have different counts, or if Adam's count is missing.
    """
    found: dict[float, Path] = {}
    for path in (folder / "zero" / name / "step.pt" for name in names):
        if path.is_file():
            step = _number(load_pickle(path))
            if step is None:
                raise ConfigError(str(path), problem="it holds no number", remedy=_ANOTHER)
            found.setdefault(step, path)
    if len(found) > 1:
        (first, _), (second, path), *_ = sorted(found.items())
        raise ConfigError(str(path), found=second, expected=f"{first:g}, as other parameters have",
                          remedy=_ANOTHER)
    if found:
        return next(iter(found))
    try:
        step = _number(optimizer["optimizer_state_dict"]["state"][0]["step"])
    except (KeyError, TypeError, IndexError):
        step = None
    if step is None and {*states} >= _ADAM:
        raise ConfigError(str(folder / "zero"), problem="the optimizer's step count is missing: there is no "
                          "zero/NAME/step.pt, and none in zero/optimizer_state.pt", remedy=_ANOTHER)
    return step or 0.0


def _optimizer(ds_config: Mapping[str, Any] | None, groups: Sequence[Mapping[str, Any]],
               states: Sequence[str]) -> dict[str, Any]:
    """Return type and parameters of the optimizer: of the JSON, and of the group whose weights decay most.

    A client's optimizer has no name in the checkpoint. torch's AdamW records that its weight decay is decoupled.
    """
    block = (ds_config or {}).get("optimizer")
    block = block if isinstance(block, dict) else {}
    params = dict(block["params"]) if isinstance(block.get("params"), dict) else {}
    group = max(groups, key=lambda group: _number(group.get("weight_decay")) or 0.0, default={})
    for key in ("betas", "eps", "weight_decay", "momentum"):
        value = group.get(key)
        if isinstance(value, (list, tuple)) and all(_number(item) is not None for item in value):
            params[key] = [_number(item) for item in value]
        elif _number(value) is not None:
            params[key] = _number(value)
    if "lr" not in params and (rate := _number(group.get("initial_lr", group.get("lr")))) is not None:
        params["lr"] = rate
    kind = block.get("type")
    if kind is None and "decoupled_weight_decay" in group and {*states} == _ADAM:
        kind = "AdamW" if group["decoupled_weight_decay"] else "Adam"
    return ({"type": kind} if isinstance(kind, str) else {}) | ({"params": params} if params else {})


def _weight_decay(model: Mapping[str, Any], optimizer: Mapping[str, Any],
                  groups: Sequence[Mapping[str, Any]]) -> float | dict[str, float] | None:
    """Return the weight decay of all parameters, or of each one by name; None if the checkpoint does not record it.

    This program records it. DeepSpeed's `param_shapes` lists the parameters of each group (ZeRO-1 and 2) or sub-group
    (ZeRO-3). At ZeRO-3, the numbers under "params" of a group are its sub-groups.
    """
    recorded = model.get(DECAYS)
    if isinstance(recorded, dict):
        return {str(name): _number(decay) or 0.0 for name, decay in recorded.items()}
    decays = [_number(group.get("weight_decay")) for group in groups]
    if not decays or None in decays:
        return None
    if len({*decays}) == 1:
        return decays[0]
    shapes = model.get("param_shapes")
    if not isinstance(shapes, list) or not all(isinstance(names, dict) for names in shapes):
        return None
    group_of = dict(enumerate(range(len(groups))))
    if "optimizer_state_dict" in optimizer:
        group_of = {number: index for index, group in enumerate(groups)
                    for number in group.get("params") or () if isinstance(number, int)}
    if {*group_of} != {*range(len(shapes))}:
        return None
    return {name: decays[group_of[number]] or 0.0 for number, names in enumerate(shapes) for name in names}


def _schedule(model: Mapping[str, Any], ds_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return type and position of the schedule, of DeepSpeed or torch; {} if the checkpoint has none."""
    state = model.get("lr_scheduler")
    if not isinstance(state, dict):
        return {}
    block = (ds_config or {}).get("scheduler")
    found: dict[str, Any] = {}
    if isinstance(block, dict) and isinstance(block.get("type"), str):
        found = {"type": block["type"], "params": block.get("params")}
    for key, offset in (("last_epoch", 0), ("last_batch_iteration", 1)):  # DeepSpeed's schedules count from -1
        if type(state.get(key)) is int:
            return {**found, "last_step": state[key] + offset}
    return found


def _batch_size(ds_config: Mapping[str, Any] | None, model: Mapping[str, Any]) -> int | None:
    """Return the samples of a step: of the JSON, or of its micro-batches and the number of data-parallel ranks."""
    values = ds_config or {}
    if type(values.get("train_batch_size")) is int:
        return int(values["train_batch_size"])
    parts = (values.get("train_micro_batch_size_per_gpu"), values.get("gradient_accumulation_steps", 1),
             model.get("dp_world_size"))
    product = 1
    for part in parts:
        if type(part) is not int:
            return None
        product *= part
    return product


def _precision(ds_config: Mapping[str, Any] | None) -> str:
    for name in ("bf16", "fp16"):
        block = (ds_config or {}).get(name)
        if isinstance(block, dict) and block.get("enabled") is True:
            return name
    return "fp32"


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the state of fp16's loss scaler, with the keys of our manifest; None without a dynamic scaler."""
    scaler = optimizer.get("loss_scaler")
    values = {name: _number(getattr(scaler, name, None)) for name in _SCALER}
    found = {name: value for name, value in values.items() if value is not None}
    return found if "cur_iter" in found else None
