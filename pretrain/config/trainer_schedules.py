"""Learning-rate schedules of transformers (5.23, optimization.py): the flags with which each step has the same rate."""

from collections.abc import Mapping
from typing import Any

# a schedule -> --lr_schedule, and the keys of lr_scheduler_kwargs with their defaults
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {"num_cycles": 0.5}),
    "cosine_with_restarts": ("cosine", {"num_cycles": 1}),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}),
    "cosine_warmup_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None,
                                             "warmup_lr_rate": None}),
    "polynomial": ("linear", {"lr_end": 1e-7, "power": 1.0}),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant", {}),
    "inverse_sqrt": ("inverse_sqrt", {"timescale": None}),
    "warmup_stable_decay": ("wsd", {"num_decay_steps": None, "num_stable_steps": None, "warmup_type": "linear",
                                    "decay_type": "cosine", "min_lr_ratio": 0, "num_cycles": 0.5}),
}
NAMES = tuple(_KINDS)
_OF_LOSSES = ("reduce_lr_on_plateau", "greedy")
_FIXED = ("num_cycles", "power")  # only the default is a schedule of this program
_FROM_1 = "cosine_warmup_with_min_lr"  # steps are numbered from 1


def schedule_flags(kind: str, settings: Mapping[str, Any], *, warmup: int, total: int | None,
                   passed: int = 0) -> tuple[dict[str, Any], str]:
    """Return the flags of a schedule, or ({}, the reason why no flags describe it).

    Args:
        kind: value of lr_scheduler_type.
        settings: lr_scheduler_kwargs.
        warmup: steps; 0 for "constant", which has no warm-up.
        total: steps of the run; None: not known, and no flag is returned for the end of the decay.
        passed: steps that are over, so that their rates do not matter.
    """
    if reason := _difference(kind, settings, warmup=warmup, total=total, passed=passed):
        return {}, reason
    ours, values = _KINDS[kind][0], {**_KINDS[kind][1], **settings}
    warmup = 0 if kind == "constant" else warmup
    flags: dict[str, Any] = {"lr_schedule": ours, "lr_warmup_steps": warmup}
    if kind != _FROM_1 and (ours != "constant" or warmup):
        flags["lr_counts_from_0"] = True
    if ours in ("constant", "inverse_sqrt"):
        return flags, ""
    stable = values.get("num_stable_steps")
    end = total if stable is None else warmup + stable + values["num_decay_steps"]
    flags |= {} if end is None else {"lr_decay_steps": end}
    if ours == "wsd":
        flags |= {"lr_wsd_steps": values["num_decay_steps"], "lr_decay_shape": values["decay_type"]}
    lowest = values.get("lr_end", values.get("min_lr"))
    ratio = values.get("min_lr_rate") if ours == "cosine" else values.get("min_lr_ratio")
    return flags | ({"min_lr_ratio": ratio or 0.0} if lowest is None else {"min_lr": lowest}), ""


def _difference(kind: str, settings: Mapping[str, Any], *, warmup: int, total: int | None, passed: int) -> str:
    """Return why a schedule is none of this program; "": it is one."""
    if kind in _OF_LOSSES:
        return f"the rates of {kind} follow from the losses"
    if kind not in _KINDS:
        return f"nothing here computes the schedule {kind}"
    values = {**_KINDS[kind][1], **settings}
    for name, value in settings.items():
        if name not in _KINDS[kind][1]:
            return f"nothing here computes {name} of {kind}"
        if name in _FIXED and value != _KINDS[kind][1][name]:
            return f"nothing here computes {name} {value} of {kind}"
    if kind != "constant" and total is not None and warmup > total:
        return f"its warm-up of {warmup} steps is longer than the run"
    numbers = [value for name, value in values.items() if not name.endswith("_type") and value is not None]
    if not all(type(value) in (int, float) for value in numbers):
        return f"the settings of {kind} are not understood"
    if kind == "inverse_sqrt" and (not warmup or values["timescale"] not in (None, warmup)):
        return "inverse_sqrt falls here as from the end of the warm-up, and there as from step " \
               f"{values['timescale'] or warmup or 10_000} (timescale)"
    if kind == "warmup_stable_decay":
        return _difference_of_wsd(values, warmup=warmup, total=total, passed=passed)
    if values.get("warmup_lr_rate") is not None and passed < warmup:
        return f"nothing here computes warmup_lr_rate of {kind}"
    return ""


def _difference_of_wsd(values: Mapping[str, Any], *, warmup: int, total: int | None, passed: int) -> str:
    decay, stable = values["num_decay_steps"], values["num_stable_steps"]
    if type(decay) is not int or type(stable) not in (int, type(None)):
        return "num_decay_steps of warmup_stable_decay is missing, or a number of steps is not whole"
    if values["decay_type"] not in ("linear", "cosine", "1-sqrt"):
        return f"nothing here computes decay_type {values['decay_type']} of warmup_stable_decay"
    if passed < warmup and (values["warmup_type"] != "linear" or values["min_lr_ratio"]):
        return "the warm-up of warmup_stable_decay is here a line that begins at 0"
    if stable is None and total is not None and warmup + decay > total:
        return "warm-up and decay of warmup_stable_decay are longer than the run"
    return ""
