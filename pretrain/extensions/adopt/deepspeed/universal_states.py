"""Read what a universal checkpoint records besides tensors: steps, parameter groups, schedule, loss scale, JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.deepspeed.zero_files import global_batch_size, precision_of
from pretrain.extensions.adopt.foreign_run import Omission
from pretrain.extensions.adopt.mapping import load_foreign_pickle, loss_scale_of, number
from pretrain.extensions.adopt.optimizers import Recognized, recognize

_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ANOTHER = "use another checkpoint"
_LOST = {"data_sampler": "DeepSpeed's curriculum over samples", "random_ltd": "random layer dropping"}
DECAYS = "ds_pretrain_weight_decay"  # key of each parameter's weight decay in a checkpoint that this program wrote
_ADAM = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class EngineStates:
    """The states of a universal checkpoint that are no tensors. Most fields are those of `ForeignRun`."""

    files: tuple[Path, ...]
    step: int
    optimizer_step: float
    skipped_steps: int
    optimizer: Recognized
    # one value of all parameters, or one of each by its name in the files; None: not recorded
    weight_decay: float | Mapping[str, float] | None
    groups: list[dict[str, Any]]  # settings of the optimizer's parameter groups
    scheduler: Mapping[str, Any] | None  # state of the learning-rate schedule; None: not recorded
    global_batch_size: int | None
    consumed_samples: int | None
    seq_length: int | None
    precision: str
    loss_scale: dict[str, float] | None
    seed: int | None
    ds_config: dict[str, Any]
    omissions: tuple[Omission, ...]


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
    ds_config, scheduler = _dict_or_empty(model.get("ds_config")), model.get("lr_scheduler")
    step = _count(model, "global_steps", path)
    assert step is not None
    samples = _count(model, "consumed_samples" if "consumed_samples" in model else "global_samples", path, None)
    precision, groups = precision_of(ds_config), _groups(optimizer, optimizer_path)
    recognized = _own_optimizer(ds_config, states) if DECAYS in model else \
        recognize(str(optimizer_path), groups, states, ds_config)
    lost = [Omission("other_states", f"the state of {what}") for key, what in _LOST.items()
            if model.get(key) is not None]
    return EngineStates(
        files=(path, optimizer_path), step=step, optimizer_step=_optimizer_step(folder, optimizer, names, states),
        skipped_steps=_count(model, "skipped_steps", path, 0) or 0,
        optimizer=recognized,
        weight_decay=_weight_decay(model, optimizer, groups), groups=groups,
        scheduler=scheduler if isinstance(scheduler, dict) else None,
        global_batch_size=global_batch_size({**model, "global_steps": step}, ds_config), consumed_samples=samples,
        seq_length=_count(model, "seq_length", path, None), precision=precision,
        loss_scale=loss_scale_of(optimizer.get("loss_scaler")) if precision == "fp16" else None,
        seed=_count(model, "seed", path, None),
        ds_config=ds_config, omissions=(*recognized.omissions, *lost))


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _groups(optimizer: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups. Raises ConfigError if there are none with a learning rate."""
    groups = optimizer.get("param_groups")
    rates = [number(_dict_or_empty(group).get("lr")) for group in groups] if isinstance(groups, list) else []
    if not rates or None in rates:
        raise ConfigError(f"{path}: param_groups", problem="it is not a list of parameter groups with a learning rate",
                          remedy=_ANOTHER)
    assert isinstance(groups, list)
    return groups


def _own_optimizer(ds_config: Mapping[str, Any], states: Sequence[str]) -> Recognized:
    """Return the optimizer of a checkpoint that this program wrote. Its groups have only what schedules change."""
    block = _dict_or_empty(ds_config.get("optimizer"))
    return Recognized(str(block.get("type", "")), tuple(states), _dict_or_empty(block.get("params")))


def _dict_in(path: Path) -> dict[str, Any]:
    """Return the dict in a pickle; its tensors are memory-mapped. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(str(path), problem="this file is missing",
                          remedy="copy the whole output folder of ds_to_universal")
    value = load_foreign_pickle(path, mmap=True)
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


def _optimizer_step(folder: Path, optimizer: Mapping[str, Any], names: Iterable[str], states: Sequence[str]) -> float:
    """Return the optimizer's step count: of the parameters (ZeRO-1 and 2), or of the optimizer's state (ZeRO-3).

    Raises ConfigError if parameters have different counts, or if Adam's count is missing.
    """
    found: dict[float, Path] = {}
    for path in (folder / "zero" / name / "step.pt" for name in names):
        if path.is_file():
            step = number(load_foreign_pickle(path))
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
        step = number(optimizer["optimizer_state_dict"]["state"][0]["step"])
    except (KeyError, TypeError, IndexError):
        step = None
    if step is None and {*states} >= _ADAM:
        raise ConfigError(str(folder / "zero"), problem="the optimizer's step count is missing: there is no "
                          "zero/NAME/step.pt, and none in zero/optimizer_state.pt", remedy=_ANOTHER)
    return step or 0.0


def _weight_decay(model: Mapping[str, Any], optimizer: Mapping[str, Any],
                  groups: Sequence[Mapping[str, Any]]) -> float | dict[str, float] | None:
    """Return the weight decay of all parameters, or of each one by name; None if the checkpoint does not record it.

    This program records it. DeepSpeed's `param_shapes` lists the parameters of each group (ZeRO-1 and 2) or sub-group
    (ZeRO-3). At ZeRO-3, the numbers under "params" of a group are its sub-groups.
    """
    recorded = model.get(DECAYS)
    if isinstance(recorded, dict):
        return {str(name): number(decay) or 0.0 for name, decay in recorded.items()}
    decays = [number(group.get("weight_decay")) for group in groups]
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
